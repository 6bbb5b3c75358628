"""The MNIST models: BNN against autograd, choice by validation, batches, chunks, and the real figures."""

import numpy as np
import pytest
import torch

from fewshot_dpkl.data.mnist import read_mnist, split_digits
from fewshot_dpkl.experiments.mnist.models import (
    MODELS,
    fit_trials,
    make_heads,
    mean_embedding_of,
    mean_nll,
    score,
)
from fewshot_dpkl.experiments.mnist.sweep import Cell, run_cell, run_cells
from fewshot_dpkl.heads.base import one_hot, unit
from fewshot_dpkl.heads.bayesian import BLRHead, BNNHead
from fewshot_dpkl.heads.training.layers import FreeLayers
from fewshot_dpkl.heads.training.particle import Training, directions, look_at_kernels, predict
from fewshot_dpkl.heads.training.similarity import ExactKernel, PairedProduct
from fewshot_dpkl.kernels import fourier_features
from fewshot_dpkl.particles import particle_kernel, svgd_direction
from tests.heads.test_heads import task


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def networks(inputs, weights, theta, cosine):
    """log ρ [E, b, m, C] of m networks with plain operations."""
    z = (inputs[:, None] @ weights).relu()  # E m b d
    if cosine:
        z, theta = (torch.nn.functional.normalize(a, dim=-1) for a in (z, theta))
    return torch.einsum("embd,emcd->ebmc", z, theta).log_softmax(-1)


@pytest.mark.parametrize("repulsion", [1.0, -1.0])
@pytest.mark.parametrize("cosine", [True, False])
def test_directions_of_a_bayesian_network_agree_with_autograd(cosine, repulsion):
    inputs, targets = double(3, 4, 5), one_hot(torch.arange(12).view(3, 4) % 3, torch.float64)
    weights, theta = double(3, 2, 5, 6, seed=1).requires_grad_(), double(3, 2, 3, 6, seed=2).requires_grad_()
    log_rho = networks(inputs, weights, theta, cosine)
    prior = 0.01 * (weights.square().sum() + theta.square().sum())
    scores = torch.autograd.grad(9 / 4 * (log_rho * targets[:, :, None]).sum() - prior, [weights, theta])
    with torch.no_grad():
        whole = torch.cat([weights.flatten(2), theta.flatten(2)], -1)  # E m p
        expected = -svgd_direction(whole, torch.cat([s.flatten(2) for s in scores], -1), repulsion=repulsion)
        layers = FreeLayers(inputs, weights.transpose(1, 2).contiguous(), "sgd", 1.0)
        before, everything = layers.values.clone(), torch.arange(4).expand(3, -1)
        mixing = look_at_kernels(theta, layers.distances(), joint=True, prior=0.01, repulsion=repulsion)
        similarity = PairedProduct(cosine)
        gradient, step = directions(layers.hidden(everything), targets, theta, similarity, mixing, n=9)
        layers.move(everything, gradient, mixing.drift)
    moved = (before - layers.values).transpose(1, 2)
    torch.testing.assert_close(torch.cat([moved.flatten(2), step.flatten(2)], -1), expected)


def test_repulsion_is_the_sign_of_the_kernel_gradient():
    particles, scores = double(4, 3), double(4, 3, seed=1)
    away = particles[:, None] - particles[None]  # from j to i
    kappa, h = particle_kernel(away.square().sum(-1))
    for sign in (1.0, 0.0, -1.0):
        expected = (kappa @ scores + sign * 2 / h * (kappa[..., None] * away).sum(1)) / 4
        torch.testing.assert_close(svgd_direction(particles, scores, repulsion=sign), expected)


def test_attraction_draws_particles_together():
    x, y, _, _ = (torch.tensor(a)[None] for a in task())
    spread = {}
    for sign in (1.0, -1.0):
        state = BLRHead(epochs=60, repulsion=sign).fit_episodes(x, y, [0])
        spread[sign] = float(state["class_weights"].std(1).mean())
    assert spread[-1.0] < 0.9 * spread[1.0]


@pytest.mark.parametrize("cosine", [True, False])
def test_a_bayesian_network_learns_and_predicts_the_mean_of_its_networks(cosine):
    x, y, xq, yq = task()
    head = BNNHead(latent=24, particles=4, epochs=40, learning_rate=0.01, cosine=cosine).fit(x, y)
    assert head.score(xq, yq) > 0.9
    weights, theta = (head.state_[key].double() for key in ("weights", "class_weights"))
    queries = unit(torch.tensor(xq).double())[None]
    expected = networks(queries, weights.transpose(1, 2), theta, cosine)[0].exp().mean(1)
    np.testing.assert_allclose(head.predict_proba(xq), expected[:, head._order], atol=1e-7)


@pytest.mark.parametrize("similarity", [PairedProduct(), ExactKernel(1.0)])
def test_the_parameters_with_the_least_validation_error_are_kept(similarity):
    """Training that looks only at its end, stopped at 10, 20, ... epochs, gives every state there was."""
    tasks = [[torch.tensor(a) for a in task(seed, spread=2.0)] for seed in range(3)]
    x, y, xv, yv = (torch.stack(column) for column in zip(*tasks, strict=True))
    draw = torch.Generator().manual_seed(0)
    start, theta = 0.2 * torch.randn(3, 30, 3, 8, generator=draw), torch.randn(3, 3, 4, 8, generator=draw)
    orders = torch.rand(3, 50, x.shape[1], generator=draw).argsort(-1)
    looks: list[int] = []
    settings = dict(batch_size=7, learning_rate=0.1, prior=1e-3)

    def layers():
        return FreeLayers(x, start, "adam", 0.1, judged=xv)

    parts = (y, theta, similarity)
    kept = Training(layers(), *parts, orders, judged_labels=yv, on_check=looks.append, **settings).run()
    assert looks == [10, 20, 30, 40, 50]
    seen = []
    for epochs in looks:
        orders_so_far = orders[:, :epochs]
        settings |= dict(check_every=epochs)
        now = Training(layers(), *parts, orders_so_far, judged_labels=yv, **settings).run()
        log_p = predict(xv, now, similarity)
        wrong = (log_p.argmax(-1) != yv).float().mean(1)
        seen.append([(float(wrong[e]), float(mean_nll(log_p, yv)[e]), now.theta[e]) for e in range(3)])
    best = [min((row[e] for row in seen), key=lambda entry: entry[:2])[2] for e in range(3)]
    torch.testing.assert_close(kept.theta, torch.stack(best))
    assert any(not kept.theta[e].equal(seen[-1][e][2]) for e in range(3))  # and it is not just the last


def digits_of(seed=0, trials=3, training=40, validation=10, test=30, side=5):
    """Made-up digits: training, validation ([T, n, D], [T, n]) and test ([q, D], [q])."""
    rng = np.random.default_rng(seed)
    centres = rng.exponential(size=(10, side * side))

    def draw(*shape):
        labels = np.broadcast_to(np.arange(shape[-1]) % 10, shape)
        x = np.abs(centres[labels] + 0.7 * rng.normal(size=(*shape, side * side)))
        return torch.tensor(x, dtype=torch.float32), torch.tensor(labels)

    return draw(trials, training), draw(trials, validation), draw(test)


@pytest.mark.parametrize("model", MODELS)
def test_a_trial_is_the_same_in_any_batch_and_the_score_in_any_chunk(model):
    training, validation, test = digits_of()
    together = fit_trials(make_heads(model, epochs=10), training, validation, [5, 6, 7])
    error, nll = score(together, *test, chunk=7)
    assert error.shape == nll.shape == (3,)
    torch.testing.assert_close(torch.stack(score(together, *test)), torch.stack((error, nll)))
    last = [tuple(t[2:] for t in part) for part in (training, validation)]
    alone = score(fit_trials(make_heads(model, epochs=10), *last, [7]), *test)
    assert float(alone[1][0]) == pytest.approx(float(nll[2]), rel=1e-4)
    assert len({round(float(value), 6) for value in nll}) == 3


def test_the_score_is_the_error_and_the_mean_nll_of_the_mean_probability():
    training, validation, (x, y) = digits_of()
    head = make_heads("dblr", epochs=20)[0]
    (part,) = fit_trials([head], training, validation, [0, 1, 2])
    error, nll = score([part], x, y, chunk=11)
    for trial in range(3):
        state = {key: value[trial : trial + 1] for key, value in part.state.items()}
        p = head.log_proba_episodes(state, x[None])[0].exp()
        assert float(error[trial]) == pytest.approx(100 * float((p.argmax(-1) != y).double().mean()))
        assert float(nll[trial]) == pytest.approx(-float(p[torch.arange(len(y)), y].log().mean()), rel=1e-5)


def test_every_trial_chooses_the_lengthscale_of_the_best_validation_likelihood():
    training, validation, test = digits_of(trials=4)
    heads = make_heads("dpkl-lengthscale", epochs=30)
    chosen = fit_trials(heads, training, validation, range(4))
    assert sorted(torch.cat([part.trials for part in chosen]).tolist()) == [0, 1, 2, 3]
    alone = [fit_trials([head], training, validation, range(4))[0] for head in heads]
    losses = torch.stack([mean_nll(part.log_proba(validation[0]), validation[1]) for part in alone])
    scores = [score([part], *test)[1] for part in alone]
    nll = score(chosen, *test)[1]
    for trial, best in enumerate(losses.argmin(0).tolist()):
        (part,) = [part for part in chosen if trial in part.trials]
        assert part.head.lengthscale == heads[best].lengthscale
        assert float(nll[trial]) == pytest.approx(float(scores[best][trial]), rel=1e-4)


def test_the_mean_embedding_is_that_of_the_head():
    training, validation, (x, _) = digits_of()
    (part,) = fit_trials(make_heads("dpkl", seed=3, epochs=10), training, validation, [0, 1, 2])
    mu = mean_embedding_of(part, x, seed=3, chunk=7)
    assert mu.shape == (30, 1280)
    frequencies = part.head._similarity(x).frequencies
    z = torch.nn.functional.normalize(
        (unit(x) @ part.state["weights"][0].transpose(0, 1)).relu(), dim=-1
    )  # m q d
    torch.testing.assert_close(mu, fourier_features(z, frequencies).mean(0))


def real_cell(data_root, model, size=100, trials=10) -> Cell:
    digits = read_mnist(data_root, download=False)
    split = split_digits(digits.labels, size, trials)
    return Cell(
        model, size, digits.images, digits.labels, split.training, split.validation,
        digits.test_images, digits.test_labels,
    )  # fmt: skip


def test_dpkl_on_real_digits(data_root):
    result = run_cell(real_cell(data_root, "dpkl", trials=2))
    assert np.mean([row["error"] for row in result.rows]) < 32
    assert np.mean([row["nll"] for row in result.rows]) < 2.0
    assert result.embedding.shape == (2000, 1280)


@pytest.fixture(scope="module")
def means_at_100(data_root) -> dict[str, tuple[float, float]]:
    """Mean error and NLL of ten trials by model."""
    cells = [real_cell(data_root, model) for model in ("blr", "dblr", "dpkl", "dpkl-lengthscale")]
    return {
        result.key[0]: tuple(np.mean([row[metric] for row in result.rows]) for metric in ("error", "nll"))
        for result in run_cells(cells, workers=2)
    }


@pytest.mark.slow
def test_the_papers_findings_at_100_digits(means_at_100):
    dpkl, chosen = means_at_100["dpkl"], means_at_100["dpkl-lengthscale"]
    for other in ("dblr", "blr"):
        assert dpkl[0] < means_at_100[other][0]
        assert dpkl[1] < means_at_100[other][1]
    assert chosen[0] <= dpkl[0]
    assert chosen[1] <= 0.6 * dpkl[1]


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, reason="27.2 % with seed 0: two trials keep an early state, see docs/mnist.md"
)
def test_the_error_of_dpkl_at_100_digits_is_at_most_27_percent(means_at_100):
    assert means_at_100["dpkl"][0] <= 27
