"""The batched model: its embedding, loss, gradient and training against naive references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fewshot_dpkl.kernels import squared_exponential
from fewshot_dpkl.particles import functional_gradient
from fewshot_dpkl.regression import unlabelled
from fewshot_dpkl.regression.embeddings import Lengthscales, Network
from fewshot_dpkl.regression.training import Settings, backward, condition, initial_model, train

KINDS = {
    "gp": (lambda d: Lengthscales(d), Settings(particles=1, frequencies=0)),
    "dkl": (lambda d: Network((d, 6, 4, 2)), Settings(particles=1, frequencies=0)),
    "dpkl": (lambda d: Network((d, 6, 4, 2)), Settings(particles=3, frequencies=20)),
    "dpkl-weight-space": (lambda d: Network((d, 6, 4, 2)), Settings(particles=3, frequencies=4)),
    "dpkl-exact": (lambda d: Network((d, 6, 4, 2)), Settings(particles=3, frequencies=0)),
    "dpkl-unit": (lambda d: Network((d, 6, 4, 2)), Settings(particles=3, frequencies=4, prior="unit")),
}


def start(kind, trials=2, dimension=3, **changes):
    embedding, settings = KINDS[kind]
    settings = replace(settings, **changes)
    return initial_model(embedding(dimension), settings, range(trials), 2), settings


def data(trials=2, n=12, dimension=3, unlabelled=9, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(trials, n, dimension, generator=generator, dtype=dtype)
    y = torch.sin(x.double().sum(-1)) + 0.1 * torch.randn(trials, n, generator=generator).double()
    u = torch.randn(trials, unlabelled, dimension, generator=generator, dtype=dtype)
    return x, y, u


def test_the_batched_network_is_torch_nn_layer_by_layer():
    network = Network((3, 6, 4, 2))
    parameters = torch.stack([network.initial(2, torch.Generator().manual_seed(s)) for s in range(3)])
    parameters += 0.1 * torch.randn(parameters.shape)  # biases other than zero
    x = torch.randn(3, 5, 3)
    z = network(parameters, x)
    assert z.shape == (3, 2, 5, 2)
    for trial in range(3):
        for particle in range(2):
            flat, layers = parameters[trial, particle], []
            for fan_in, fan_out in ((3, 6), (6, 4), (4, 2)):
                layer = nn.Linear(fan_in, fan_out)
                layer.weight.data = flat[: fan_in * fan_out].view(fan_in, fan_out).T.clone()
                layer.bias.data = flat[fan_in * fan_out :][:fan_out].clone()
                flat = flat[fan_in * fan_out + fan_out :]
                layers += [layer, nn.ReLU()]
            expected = nn.Sequential(*layers[:-1])(x[trial])
            torch.testing.assert_close(z[trial, particle], expected)


def naive_loss(model, x, y, unlabelled, alpha, trial):
    """Equations 2, 7 and 14 by loops and dense inverses, for one trial."""
    z = model.latent(x)[trial]  # m n d
    z_new = None if unlabelled is None else model.latent(unlabelled)[trial]

    def kernel(a, b):  # [m, d] and [m, d]: one pair of points
        if model.frequencies is None:
            return torch.exp(-0.5 * (a[:, None] - b[None]).square().sum(-1)).mean()
        v = model.frequencies[trial]
        phases = [torch.cat([(v @ p).cos(), (v @ p).sin()]) / len(v) ** 0.5 for p in [*a, *b]]
        return torch.stack(phases[: len(a)]).mean(0) @ torch.stack(phases[len(a) :]).mean(0)

    n = x.shape[1]
    k = torch.stack([torch.stack([kernel(z[:, i], z[:, j]) for j in range(n)]) for i in range(n)])
    covariance = k + model.log_noise[trial].exp() * torch.eye(n, dtype=torch.float64)
    inverse = torch.linalg.inv(covariance)
    nll = 0.5 * y[trial] @ inverse @ y[trial] + 0.5 * torch.logdet(covariance * 2 * torch.pi)
    if unlabelled is None:
        return nll
    variances = []
    for u in range(unlabelled.shape[1]):
        k_star = torch.stack([kernel(z[:, i], z_new[:, u]) for i in range(n)])
        prior = kernel(z_new[:, u], z_new[:, u]) if model.prior == "own" else 1.0
        variances.append(prior - k_star @ inverse @ k_star)
    return nll / n + alpha * torch.stack(variances).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("semi", [False, True])
def test_loss_and_gradient_are_those_of_the_naive_loop(kind, semi, monkeypatch):
    for name, value in {"CACHE": 90, "WHOLE": 2, "BLOCK": 3}.items():  # several pieces, several blocks
        monkeypatch.setattr(unlabelled, name, value)
    model, _ = start(kind)
    model = model.to(torch.float64)
    x, y, u = data(dtype=torch.float64)
    u = u if semi else None
    live = replace(model, **{name: getattr(model, name).clone().requires_grad_() for name in LEARNT})
    losses = backward(live, x, y, u, alpha=0.7)
    naive = replace(model, **{name: getattr(model, name).clone().requires_grad_() for name in LEARNT})
    expected = torch.stack([naive_loss(naive, x, y, u, 0.7, trial) for trial in range(2)])
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-9, atol=1e-9)
    for name in LEARNT:
        gradient, wanted = getattr(live, name).grad, getattr(naive, name).grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-9, msg=name)


LEARNT = ("parameters", "log_lengthscale", "log_noise")


def test_a_low_rank_basis_of_the_kernel_changes_nothing(monkeypatch):
    z = 0.5 * torch.randn(2, 300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = squared_exponential(z, z)
    basis = unlabelled.low_rank_basis(kernel)
    assert basis.shape[-1] < 100
    torch.testing.assert_close(basis @ (basis.mT @ kernel), kernel, rtol=0, atol=1e-10)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1]).double().expand(2, -1, -1))
    assert unlabelled.low_rank_basis(torch.eye(90).double()[None]) is None
    x, y, u = (tensor.double() for tensor in data(n=120, unlabelled=70))
    found = []
    for negligible in (unlabelled.NEGLIGIBLE, -1.0):  # never reached: no basis
        monkeypatch.setattr(unlabelled, "NEGLIGIBLE", negligible)
        model = start("dkl")[0].to(torch.float64)
        live = replace(model, parameters=model.parameters.requires_grad_())
        kernel = model.kernel(model.embed(x), model.embed(x))
        assert (unlabelled.low_rank_basis(kernel) is None) == (negligible < 0)
        found.append((backward(live, x, y, u, alpha=5.0), live.parameters.grad))
    for with_basis, without in zip(*found, strict=True):
        torch.testing.assert_close(with_basis, without, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["gp", "dkl", "dpkl", "dpkl-weight-space"])
def test_the_semi_supervised_gradient_agrees_with_finite_differences(kind):
    model, _ = start(kind, trials=1)
    model = model.to(torch.float64)
    model = replace(
        model, parameters=model.parameters + 0.1 * torch.randn(model.parameters.shape)
    )  # off ReLU kinks
    x, y, u = data(trials=1, dtype=torch.float64)
    live = replace(model, parameters=model.parameters.clone().requires_grad_())
    backward(live, x, y, u, alpha=1.0)
    gradient = live.parameters.grad.flatten()
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        direction = torch.randn(model.parameters.shape, generator=generator, dtype=torch.float64)
        values = []
        for step in (1e-6, -1e-6):
            moved = replace(model, parameters=(model.parameters + step * direction).requires_grad_())
            values.append(float(backward(moved, x, y, u, alpha=1.0)))
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(float(gradient @ direction.flatten()), rel=1e-5, abs=1e-7)


def test_one_epoch_is_algorithm_1_with_nadam():
    model, settings = start("dpkl", epochs=1, validation_fraction=0.0)
    x, y, u = data()
    trained = train(model, x, y, u, settings)
    by_hand = model.parameters.clone().requires_grad_()
    backward(replace(model, parameters=by_hand), x, y, u, 1.0)
    by_hand.grad = functional_gradient(by_hand, by_hand.grad)
    torch.optim.NAdam([by_hand], lr=1e-3).step()
    torch.testing.assert_close(trained.model.parameters, by_hand.detach().double())
    assert not torch.equal(by_hand, model.parameters)


@pytest.mark.parametrize("kind", ["gp", "dkl", "dpkl", "dpkl-weight-space"])
@pytest.mark.parametrize("semi", [False, True])
def test_a_trial_does_not_depend_on_its_batch(kind, semi):
    x, y, u = data(trials=3, n=20)
    new = torch.randn(3, 6, 3)
    model, settings = start(kind, trials=3, epochs=20)
    together = train(model, x, y, u if semi else None, settings).predict(new)
    for trial in range(3):
        embedding, _ = KINDS[kind]
        alone = initial_model(embedding(3), settings, [trial], 2)
        part = slice(trial, trial + 1)
        apart = train(alone, x[part], y[part], u[part] if semi else None, settings).predict(new[part])
        for a, b in zip(together, apart, strict=True):
            torch.testing.assert_close(a[part], b, rtol=1e-3, atol=1e-3)  # float32 networks


def test_dkl_is_dpkl_with_one_particle_and_the_closed_form_kernel():
    x, y, _ = data(n=20)
    new = torch.randn(2, 6, 3)
    dkl, settings = start("dkl", epochs=20)
    dpkl, other = start("dpkl-exact", epochs=20, particles=1)
    assert settings == other
    for a, b in zip(
        train(dkl, x, y, None, settings).predict(new),
        train(dpkl, x, y, None, other).predict(new),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_the_first_particle_starts_where_dkl_starts():
    one, three = (Network((3, 4, 2)).initial(m, torch.Generator().manual_seed(5)) for m in (1, 3))
    assert torch.equal(one[0], three[0])
    assert not torch.equal(three[0], three[1])


def test_many_frequencies_come_close_to_the_closed_form():
    x, y, _ = data(n=20)
    new = torch.randn(2, 6, 3)
    exact, _ = start("dpkl-exact")
    many, _ = start("dpkl", frequencies=20000)
    many = replace(many, parameters=exact.parameters)
    for a, b in zip(condition(exact, x, y).predict(new), condition(many, x, y).predict(new), strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def test_the_epoch_with_the_least_validation_error_is_kept():
    x, y, _ = data(trials=4, n=30)
    model, settings = start("dpkl", trials=4, epochs=40, check_every=10, lr=0.05)
    trained = train(model, x, y, None, settings)
    best = trained.history.argmin(0)
    assert len(set(best.tolist())) > 1, "the trials stop at different epochs, or this shows nothing"
    for trial in range(4):
        shorter = replace(settings, epochs=10 * (int(best[trial]) + 1))
        parameters = train(model, x, y, None, shorter).model.parameters[trial]
        torch.testing.assert_close(trained.model.parameters[trial], parameters)


def test_validation_points_are_held_out_unless_asked_for():
    x, y, _ = data(n=20)
    model, settings = start("dpkl-exact", epochs=10)
    assert train(model, x, y, None, settings).embedded.shape[-2] == 18
    assert train(model, x, y, None, replace(settings, use_validation=True)).embedded.shape[-2] == 20
    changed = y.clone()
    changed[:, 18:] += 5
    for a, b in zip(
        train(model, x, y, None, settings).predict(x),
        train(model, x, changed, None, settings).predict(x),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_training_lowers_the_loss():
    x, y, u = data(n=30, unlabelled=40)
    for kind in KINDS:
        model, settings = start(kind, validation_fraction=0.0, lr=1e-2)
        before = condition(model, x, y).posterior.nll
        assert (train(model, x, y, None, settings).posterior.nll < before).all(), kind
        unregularised = train(model, x, y, None, settings)
        regularised = train(model, x, y, u, replace(settings, alpha=20.0))
        assert (regularised.predict(u)[1].mean(-1) < unregularised.predict(u)[1].mean(-1)).all(), kind


def test_noise_and_lengthscale_are_fixed_unless_learnt():
    x, _, _ = data(n=60)
    y = torch.sin(x.double().sum(-1))
    model, settings = start("dkl")
    fixed = train(model, x, y, None, settings).model
    assert torch.equal(fixed.log_noise, model.log_noise.double())
    assert torch.equal(fixed.log_lengthscale, model.log_lengthscale.double())
    free = replace(settings, learn_noise=True, learn_lengthscale=True, validation_fraction=0.0)
    learnt = train(model, x, y, None, free)
    assert (learnt.model.log_noise < -1).all(), "noise-free data"
    assert not torch.equal(learnt.model.log_lengthscale, model.log_lengthscale.double())
    assert (
        learnt.posterior.nll
        < train(model, x, y, None, replace(settings, validation_fraction=0.0)).posterior.nll
    ).all()


def test_a_learnt_noise_is_judged_by_likelihood():
    x, y, _ = data(n=40)
    model, settings = start("dpkl", learn_noise=True, epochs=10)
    trained = train(model, x, y, None, settings)
    mean, variance = trained.predict(x[:, 36:])
    nll = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[:, 36:]).mean(-1)
    torch.testing.assert_close(trained.history[0], nll, rtol=1e-4, atol=1e-4)


def test_divergence_is_an_error_not_a_nan():
    x, y, _ = data()
    model, settings = start("dkl", lr=1e30)
    with pytest.raises(ValueError, match=r"diverged|not finite"):
        train(model, x, y, None, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_joint_covariance_holds_the_variances(kind):
    x, y, _ = data(n=20)
    new = torch.randn(2, 6, 3)
    trained = condition(start(kind)[0], x, y)
    covariance, variance = trained.covariance(new), trained.predict(new)[1]
    torch.testing.assert_close(covariance.diagonal(dim1=-2, dim2=-1), variance)
    torch.testing.assert_close(covariance, covariance.mT)
    assert (torch.linalg.eigvalsh(covariance) > 0).all()
