"""The steps of training and the support span, held to plain operations and to the reference loop."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import reference
from fewshot_dpkl import BLRHead, CosineHead, DBLRHead, DPKLHead
from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.heads.span import support_span
from fewshot_dpkl.heads.training.draws import Draws, Start, sign_weights, uniform_weights
from fewshot_dpkl.heads.training.layers import FreeLayers, SpanLayers
from fewshot_dpkl.heads.training.particle import (
    class_log_probabilities,
    directions,
    embed,
    look_at_kernels,
    predictive,
)
from fewshot_dpkl.heads.training.similarity import DotProduct, ExactKernel, FourierKernel
from fewshot_dpkl.kernels import random_frequencies
from fewshot_dpkl.particles import functional_gradient, svgd_direction
from tests.heads.test_heads import task


def frequencies(d: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return random_frequencies(d, number, orthogonal=True, generator=generator, dtype=torch.float64)


SIMILARITIES = {
    "exact": lambda: ExactKernel(1.0),
    "exact, short lengthscale": lambda: ExactKernel(0.15),
    "rff": lambda: FourierKernel(frequencies(6, 64)),
    "rff, so few that values fall below the floor": lambda: FourierKernel(frequencies(6, 2)),
}


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_directions_agree_with_autograd(kind):
    inputs, targets = double(3, 4, 5), one_hot(torch.arange(12).view(3, 4) % 3, torch.float64)
    weights, theta = double(3, 2, 5, 6, seed=1).requires_grad_(), double(3, 4, 3, 6, seed=2).requires_grad_()
    n, prior = 9, 0.01

    log_rho = autograd_log_rho(inputs, weights, theta, kind)
    loss = -(predictive(log_rho) * targets).sum(-1).mean(1).sum()
    weight_grad = torch.autograd.grad(loss, weights, retain_graph=True)[0]
    log_posterior = n / 4 * (log_rho * targets[:, :, None]).sum() - prior * theta.square().sum()
    score = torch.autograd.grad(log_posterior, theta)[0]
    with torch.no_grad():
        expected = [
            functional_gradient(weights.flatten(2), weight_grad.flatten(2)).view_as(weights).transpose(1, 2),
            -svgd_direction(theta.flatten(2), score.flatten(2)).view_as(theta),
        ]
        layers = FreeLayers(inputs, weights.transpose(1, 2).contiguous(), "sgd", 1.0)
        before, everything = layers.values.clone(), torch.arange(4).expand(3, -1)
        mixing = look_at_kernels(theta, layers.distances(), prior=prior)
        similarity, hidden = SIMILARITIES[kind](), layers.hidden(everything)
        gradient, theta_step = directions(hidden, targets, theta, similarity, mixing, n=n)
        layers.move(everything, gradient, None)
    torch.testing.assert_close(before - layers.values, expected[0])
    torch.testing.assert_close(theta_step, expected[1])


def autograd_log_rho(inputs, weights, theta, kind):
    """The model written with plain operations: log ρ [E, b, P, C]."""
    z = torch.nn.functional.normalize((inputs[:, None] @ weights).relu(), dim=-1)  # E m b d
    t = torch.nn.functional.normalize(theta, dim=-1)  # E P C d
    similarity = SIMILARITIES[kind]()
    if isinstance(similarity, ExactKernel):
        distance = (z[:, :, :, None, None] - t[:, None, None]).square().sum(-1)  # E m b P C
        k = torch.exp(-distance * similarity.precision / 2)
    else:
        v = similarity.frequencies
        k = torch.cos((z[:, :, :, None, None] - t[:, None, None]) @ v.T).mean(-1)
    k = k.mean(1)
    if isinstance(similarity, FourierKernel):
        k = torch.where(k > 0.01, k, 0.01 * torch.exp(k / 0.01 - 1))
    return (k / k.sum(-1, keepdim=True)).log()


def test_directions_of_plain_logistic_regression_agree_with_autograd():
    inputs, targets = double(2, 4, 5), one_hot(torch.arange(8).view(2, 4) % 3, torch.float64)
    theta = double(2, 6, 3, 5).requires_grad_()
    logits = torch.einsum("ebd,epcd->ebpc", inputs, theta)
    log_posterior = 3 * (logits.log_softmax(-1) * targets[:, :, None]).sum() - 0.01 * theta.square().sum()
    score = torch.autograd.grad(log_posterior, theta)[0]
    with torch.no_grad():
        mixing, settings = look_at_kernels(theta, None, prior=0.01), dict(n=12, layered=False)
        _, ours = directions(inputs[:, :, None], targets, theta, DotProduct(), mixing, **settings)
    torch.testing.assert_close(
        ours, -svgd_direction(theta.detach().flatten(2), score.flatten(2)).view_as(theta)
    )


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_probabilities_are_finite_whatever_the_draw(kind):
    z = embed(double(2, 7, 5), double(2, 5, 3, 6, seed=1))
    log_p = predictive(class_log_probabilities(z, double(2, 4, 3, 6, seed=2), SIMILARITIES[kind]()))
    assert log_p.isfinite().all()
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 7, dtype=torch.float64))


def test_span_coordinates_reproduce_the_points_even_with_duplicates():
    points = double(2, 6, 20)
    points[1, 3] = points[1, 0]
    span = support_span(points)
    torch.testing.assert_close(span.coordinates @ span.basis, points)
    gram = span.basis @ span.basis.transpose(-1, -2)
    torch.testing.assert_close(gram @ gram, gram)  # orthonormal, but for the direction the duplicate lacks
    torch.testing.assert_close(gram[0], torch.eye(6, dtype=torch.float64))
    assert support_span(double(2, 6, 6)).basis is None  # nothing to gain where n ≥ D


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("kernel", ["rff", "exact"])
def test_training_in_the_span_is_exact_for_sgd(kernel, optimizer):
    x, y, xq, _ = task(dimension=60)
    settings = dict(kernel=kernel, latent=16, embeddings=3, particles=3, epochs=12, optimizer=optimizer)
    heads = [DPKLHead(**settings, learning_rate=0.05, span=span).fit(x, y) for span in (True, False)]
    a, b = (head.predict_proba(xq) for head in heads)
    np.testing.assert_allclose(a, b, atol=2e-5)
    untrained = DPKLHead(**{**settings, "epochs": 1}, learning_rate=1e-9).fit(x, y).predict_proba(xq)
    assert np.abs(a - untrained).max() > 0.01  # and it is training that agrees


class FactoredAdam(torch.optim.Optimizer):
    """Adam in all D dimensions with v_kj = r_k u_j for tensors `[D, d]`, v_kj itself for class weights."""

    def __init__(self, params, lr, shares):
        super().__init__(params, dict(lr=lr))
        self.shares = shares[:, None]  # D 1

    def step(self):
        for w in self.param_groups[0]["params"]:
            state, shares = self.state[w], torch.ones(len(w), 1, dtype=w.dtype)
            square = w.grad**2
            if len(w) == len(self.shares):
                shares = self.shares
                seen = shares[:, 0] > 0
                square = (square[seen] / shares[seen]).mean(0, keepdim=True)
            state["t"] = t = state.get("t", 0) + 1
            state["m"] = 0.9 * state.get("m", 0) + 0.1 * w.grad
            state["u"] = 0.999 * state.get("u", 0) + 0.001 * square
            root = (shares * state["u"] / (1 - 0.999**t)).sqrt() + 1e-12
            w.detach().sub_(self.param_groups[0]["lr"] * state["m"] / (1 - 0.9**t) / root)


@pytest.mark.parametrize("kernel", ["rff", "exact"])
@pytest.mark.parametrize("embeddings", [1, 3])
def test_factored_adam_in_the_span_is_that_of_all_dimensions(kernel, embeddings):
    """Same draws and minibatches, every one of the D × d weights moved by itself, autograd, float64."""
    x, y, xq = (torch.tensor(a) for a in task(dimension=60)[:3])
    x, xq = x.double(), xq.double()
    x[:, 7] = 0.0  # a feature that the support set does not show, and the queries do
    shares = torch.nn.functional.normalize(x, dim=-1).square().mean(0)
    settings = dict(latent=16, embeddings=embeddings, particles=4, epochs=15, learning_rate=3e-3)
    settings |= dict(frequencies_per_step=24, kappa_every=2)
    head = DPKLHead(kernel=kernel, frequencies=64, **settings)
    v = head._similarity(x).frequencies if kernel == "rff" else None
    optimizer = partial(FactoredAdam, shares=shares)
    theirs = reference.dpkl(x, y, xq, 3, frequencies=v, optimizer=optimizer, **settings)
    ours = head.log_proba_episodes(head.fit_episodes(x[None], y[None], [3]), xq[None])[0].exp()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_layers_in_the_span_know_their_distances_and_end_where_their_values_are():
    points, start = double(2, 6, 20), double(2, 20, 3, 4, seed=1)
    points[1, 3] = points[1, 0]  # the same point twice
    layers = SpanLayers(points, Start((20, 3, 4), 1.0, given=start), "adam", 0.1)
    rows = torch.tensor([[2, 0, 1, 5], [0, 1, 2, 3]])
    for _ in range(3):
        layers.move(rows, torch.sin(layers.hidden(rows)), None)
    weights = start + torch.einsum("enk,enmd->ekmd", layers.reach, layers.values)
    torch.testing.assert_close(torch.einsum("enk,ekmd->enmd", points, weights), layers.hidden_of_judged())
    by_layer = weights.transpose(1, 2).flatten(2)
    torch.testing.assert_close(layers.distances(), torch.cdist(by_layer, by_layer).square())
    assert (weights - start).abs().amax() > 0.1


@pytest.mark.parametrize("kernel", ["rff", "exact"])
def test_a_step_of_adam_is_as_long_in_the_span_as_in_all_dimensions(kernel):
    x, y, _, _ = task(dimension=150)
    settings = dict(kernel=kernel, latent=16, embeddings=3, particles=3, epochs=1, batch_size=len(x))
    moves = []
    for span in (True, False):
        before, after = (
            DPKLHead(**settings, learning_rate=rate, span=span).fit(x, y).state_["weights"]
            for rate in (0.0, 1e-4)
        )
        moves.append(float((after - before).norm()))
    assert moves[0] == pytest.approx(moves[1], rel=0.01)


def test_the_start_is_uniform_of_the_deviation_asked_for_and_from_a_stream_of_its_own():
    draws, shape = Draws(3), (200, 3, 128)
    values = uniform_weights(draws.stream(), shape, 0.2)
    assert values.mean() == pytest.approx(0, abs=3e-3)
    assert values.std() == pytest.approx(0.2, rel=0.01)
    assert values.abs().max() == pytest.approx(0.2 * 3**0.5, rel=1e-3)
    quarters = torch.histc(values, 4) / values.numel()
    torch.testing.assert_close(quarters, torch.full((4,), 0.25), atol=5e-3, rtol=0)
    assert torch.equal(uniform_weights(Draws(3).stream(), shape, 0.2), values)
    assert torch.equal(draws.normal(5), Draws(3).normal(5))
    again = uniform_weights(Draws(4).stream(), shape, 0.2)
    assert torch.corrcoef(torch.stack([values.flatten(), again.flatten()]))[0, 1].abs() < 0.02


def test_layers_of_signs_have_signs_of_their_own_and_orthogonal_units():
    first, second = (sign_weights(Draws(seed).stream(), (192, 3, 64), 0.2) for seed in (3, 4))
    torch.testing.assert_close(first.abs(), torch.full((192, 3, 64), 0.2))
    for layer in first.unbind(1):  # D d
        torch.testing.assert_close(layer.T @ layer, 192 * 0.04 * torch.eye(64), atol=1e-4, rtol=0)
    layers = torch.cat([first, second], 1).transpose(0, 1).flatten(1)  # of both seeds: 6 Dd
    alike = layers @ layers.T / (192 * 64 * 0.04) - torch.eye(6)
    assert alike.abs().max() < 0.25  # a mean of 192 random signs
    point = torch.randn(192, generator=torch.Generator().manual_seed(0)).double()
    many = [
        point @ sign_weights(Draws(seed).stream(), (192, 3, 64), 0.2).double().flatten(1)
        for seed in range(300)
    ]
    hidden = torch.stack(many) / (0.2 * point.norm())  # of every unit normal, as of independent weights
    assert hidden.mean(0).abs().max() < 0.3
    assert hidden.std() == pytest.approx(1, abs=0.02)
    assert hidden.pow(4).mean() == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("latent", [16, 13, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # in C, if it is there, and with torch
def test_points_pass_through_the_start_as_through_its_weights(dtype, latent):
    streams = torch.stack([Draws(e).stream() for e in range(2)])
    start = Start((70, 3, latent), 0.2, streams=streams, signs=latent != 13)
    points = double(2, 5, 70).to(dtype)
    weights = start.weights(points)
    hidden, products = start.through(points, products=True)
    torch.testing.assert_close(hidden, torch.einsum("ebk,ekmd->ebmd", points, weights))
    products_of_all = torch.einsum("ekid,ekjd->eij", weights.double(), weights.double())
    rounding = 3e-4 if dtype == torch.float32 else 1e-9  # of thousands of equal squares
    torch.testing.assert_close(products.double(), products_of_all, atol=1e-3, rtol=rounding)


def test_episodes_keep_the_stream_of_their_layers_and_a_fitted_head_all_of_them():
    x, y, xq, _ = task(dimension=60)
    head = DPKLHead(latent=24, embeddings=3, epochs=5, frequencies=48).fit(x, y)
    state = head.fit_episodes(torch.tensor(x)[None], torch.tensor(y)[None], [0])
    assert set(state) == {"start", "moved", "reach", "class_weights"}
    assert set(head.state_) == {"weights", "class_weights"}
    by_stream, by_weights = (
        head.log_proba_episodes(s, torch.tensor(xq)[None]) for s in (state, head.whole(state))
    )
    torch.testing.assert_close(by_stream, by_weights, atol=1e-5, rtol=0)


def test_layers_can_start_from_normal_numbers():
    x, y, _, _ = task(dimension=40)
    still = dict(latent=16, embeddings=3, epochs=1, learning_rate=0.0)
    signs, uniform, normal = (
        DPKLHead(**still, start=s).fit(x, y).state_["weights"] for s in ("signs", "uniform", "normal")
    )
    assert signs.std() == pytest.approx(float(normal.std()), rel=0.05)
    assert uniform.std() == pytest.approx(float(normal.std()), rel=0.05)
    assert len(signs.abs().unique()) == 1
    assert normal.abs().max() > 1.2 * uniform.abs().max()
    with pytest.raises(ValueError, match="use 'signs', 'uniform' or 'normal'"):
        DPKLHead(start="zero").fit(x, y)


@pytest.mark.parametrize("kernel", ["rff", "exact"])
@pytest.mark.parametrize("embeddings", [1, 3])
def test_head_agrees_with_the_reference_loop(kernel, embeddings):
    """Same draws, same minibatches, Adam in all D dimensions, float64, everything else independent."""
    x, y, xq = (torch.tensor(a) for a in task(dimension=40)[:3])
    x, xq = x.double(), xq.double()
    settings = dict(latent=16, embeddings=embeddings, particles=4, epochs=15, learning_rate=3e-3)
    settings |= dict(frequencies_per_step=24, kappa_every=2)  # two blocks of them and a shorter one
    head = DPKLHead(kernel=kernel, frequencies=64, span=False, **settings)
    v = head._similarity(x).frequencies if kernel == "rff" else None
    theirs = reference.dpkl(x, y, xq, 3, frequencies=v, **settings)
    ours = head.log_proba_episodes(head.fit_episodes(x[None], y[None], [3]), xq[None])[0].exp()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_blr_agrees_with_the_reference_loop():
    x, y, xq = (torch.tensor(a) for a in task(dimension=40)[:3])
    x, xq = x.double(), xq.double()
    head = BLRHead(particles=4, epochs=15, learning_rate=3e-3, span=False)
    theirs = reference.blr(x, y, xq, 3, particles=4, epochs=15, learning_rate=3e-3)
    ours = head.log_proba_episodes(head.fit_episodes(x[None], y[None], [3]), xq[None])[0].exp()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_blr_in_the_span_is_gradient_descent_inside_it():
    """Against a loop over class weights of all D dimensions, whose directions are projected to the span."""
    x, y, xq = (torch.tensor(a).double() for a in task(dimension=40)[:3])
    x[:, 7] = 0  # a feature that nobody shows
    points, draws, n = torch.nn.functional.normalize(x, dim=1), Draws(3), len(x)
    targets, projection = one_hot(y.long()[None], x.dtype)[0], torch.linalg.pinv(points) @ points
    theta = draws.normal(3, 4, 40).double() / 40**0.5
    mean, square, step = torch.zeros_like(theta), torch.zeros(3, 4, 1), 0
    for order in draws.orders(4, n):
        for batch in order.split(5):
            step += 1
            residual = targets[batch, None] - (points[batch] @ theta.mT).softmax(-1).transpose(0, 1)
            score = n / 5 * torch.einsum("bpc,bd->pcd", residual, points[batch]) - 2 * 0.05 * theta
            move = -svgd_direction(theta.flatten(1), score.flatten(1)).view_as(theta) @ projection
            mean, square = 0.9 * mean + 0.1 * move, 0.999 * square + 0.001 * move.square().sum(-1, True) / 39
            root = (square / (1 - 0.999**step)).sqrt() + 1e-8
            theta = theta - 0.01 * mean / (1 - 0.9**step) / root
    theirs = torch.nn.functional.normalize(xq, dim=1) @ theta.mT
    head = BLRHead(particles=3, epochs=4, learning_rate=0.01, prior=0.05)
    state = head.fit_episodes(x[None], y.long()[None], [3])
    ours = head.particle_log_proba_episodes(state, xq[None])[0]
    torch.testing.assert_close(ours, theirs.log_softmax(-1).transpose(0, 1))


def test_dblr_is_dpkl_with_one_particle_and_a_softmax_of_the_cosine():
    x, y, xq, _ = task()
    settings = dict(latent=16, particles=3, epochs=10)
    dblr = DBLRHead(**settings).fit(x, y)
    dpkl = DPKLHead(kernel="exact", embeddings=1, **settings).fit(x, y)
    assert np.array_equal(dblr.predict_proba(xq), dpkl.predict_proba(xq))
    z = embed(torch.tensor(xq)[None], dblr.state_["weights"])[0, :, 0]  # q d
    theta = torch.nn.functional.normalize(dblr.state_["class_weights"][0], dim=-1)  # P C d
    softmax = torch.einsum("qd,pcd->pqc", z, theta).softmax(-1).mean(0)
    np.testing.assert_allclose(dblr.predict_proba(xq), softmax, atol=1e-6)


@pytest.mark.parametrize("dimension", [12, 80])
def test_cosine_head_agrees_with_the_reference_loop(dimension):
    x, y, xq, _ = task(dimension=dimension)
    theirs = reference.cosine(*(torch.tensor(a) for a in (x, y, xq)), 7, epochs=30)
    np.testing.assert_allclose(
        CosineHead(epochs=30, random_state=7).fit(x, y).predict_proba(xq), theirs, atol=1e-4
    )


def test_short_lengthscales_do_not_underflow():
    x, y, xq, yq = task(spread=0.15)
    head = DPKLHead(kernel="exact", lengthscale=0.05, latent=32, epochs=30, learning_rate=0.01).fit(x, y)
    assert head.score(xq, yq) > 0.9
