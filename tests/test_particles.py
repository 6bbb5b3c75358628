import math

import numpy as np
import pytest
import torch

from fewshot_dpkl.kernels import squared_exponential
from fewshot_dpkl.particles import (
    bandwidth,
    functional_gradient,
    particle_distances,
    particle_kernel,
    svgd_direction,
)


def particles(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_kappa(w: torch.Tensor, rule: str) -> torch.Tensor:
    """κ of one set of particles [m, p], written with loops."""
    m = len(w)
    squares = np.array([[float((a - b).square().sum()) for b in w] for a in w])
    if rule == "paper":
        h = np.median([squares[i, j] for i in range(m) for j in range(i)]) / math.log(m)
    else:
        h = np.median(squares) / math.log(m + 1)
    return torch.tensor(np.exp(-squares / h))


@pytest.mark.parametrize("rule", ["paper", "liu-wang"])
@pytest.mark.parametrize("m", [2, 4, 5, 10])
def test_particle_kernel_agrees_with_loops_for_any_batch(rule, m):
    w = particles(3, 2, m, 7)
    kappa, _ = particle_kernel(particle_distances(w), rule)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(kappa[i, j], naive_kappa(w[i, j], rule))


def test_equal_particles_and_single_particles_have_a_finite_kernel():
    kappa, _ = particle_kernel(particle_distances(torch.ones(4, 3)))
    assert torch.equal(kappa, torch.ones(4, 4))
    kappa, _ = particle_kernel(particle_distances(torch.ones(1, 3)))
    assert torch.equal(kappa, torch.ones(1, 1))


def test_unknown_bandwidth_rule_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'silverman'.*'paper' or 'liu-wang'"):
        bandwidth(torch.ones(3, 3), "silverman")  # type: ignore[arg-type]


def gp_loss(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Proposition 1's loss: GP negative log-likelihood with the mean-embedding kernel, written with loops."""
    m, n = len(weights), len(x)
    z = [torch.tanh(x @ w.reshape(x.shape[1], 2)) for w in weights]
    k = sum(squared_exponential(za, zb) for za in z for zb in z) / m**2 + torch.eye(n, dtype=x.dtype)
    return (y @ torch.linalg.solve(k, y) + torch.logdet(k)) / 2


def test_functional_gradient_equals_autograd_through_proposition_1():
    x, y = particles(6, 3), particles(6, seed=1)
    weights = particles(4, 6, seed=2)
    # One gradient per particle, by differentiating the loss of all particles with respect to that one alone.
    rows = [
        torch.autograd.functional.jacobian(lambda w, i=i: gp_loss(_replaced(weights, i, w), x, y), weights[i])
        for i in range(4)
    ]
    kappa = naive_kappa(weights, "paper")
    naive = torch.stack([sum(kappa[i, j] * rows[j] for j in range(4)) for i in range(4)])

    leaf = weights.clone().requires_grad_()
    gradients = torch.autograd.grad(gp_loss(leaf, x, y), leaf)[0]
    torch.testing.assert_close(functional_gradient(weights, gradients), naive)


def _replaced(weights: torch.Tensor, i: int, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([w if j == i else weights[j] for j in range(len(weights))])


def test_functional_gradient_of_one_particle_is_plain_gradient_descent():
    gradient = particles(5, 1, 8)
    assert torch.equal(functional_gradient(particles(5, 1, 8, seed=1), gradient), gradient)


@pytest.mark.parametrize("rule", ["paper", "liu-wang"])
def test_svgd_direction_equals_autograd_through_its_definition(rule):
    theta, scores = particles(5, 3), particles(5, 3, seed=1)
    _, h = particle_kernel(particle_distances(theta), rule)

    def kappa(a, b):
        return torch.exp(-(a - b).square().sum() / h.squeeze())

    naive = torch.zeros_like(theta)
    for i in range(5):
        for j in range(5):
            gradient = torch.autograd.functional.jacobian(lambda t, i=i: kappa(t, theta[i]), theta[j])
            naive[i] += (kappa(theta[j], theta[i]) * scores[j] + gradient) / 5
    torch.testing.assert_close(svgd_direction(theta, scores, rule), naive)


def test_svgd_recovers_mean_and_variance_of_a_gaussian_from_far_off():
    """The repulsion has the right sign: flipped, the particles collapse onto the mode."""
    mean = torch.tensor([2.0, -1.0], dtype=torch.float64)
    deviation = torch.tensor([1.0, 3.0], dtype=torch.float64)
    theta = particles(1, 60, 2) * 0.1 - 15  # far from the target and far too narrow
    adam = torch.optim.Adam([theta], lr=0.1)
    for _ in range(3000):
        theta.grad = -svgd_direction(theta, (mean - theta) / deviation**2)
        adam.step()
    torch.testing.assert_close(theta[0].mean(0), mean, atol=0.15, rtol=0)
    torch.testing.assert_close(theta[0].std(0), deviation, atol=0, rtol=0.15)


def test_svgd_finds_the_logistic_regression_posterior_of_a_long_metropolis_run():
    x, truth = particles(40, 2), torch.tensor([1.5, -1.0], dtype=torch.float64)
    y = (
        torch.rand(40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        < torch.sigmoid(x @ truth)
    ).double()

    def log_posterior(theta):  # [..., 2]
        logits = theta @ x.T
        return (y * logits - torch.nn.functional.softplus(logits)).sum(-1) - theta.square().sum(-1) / 2

    theta = particles(50, 2) * 3
    adam = torch.optim.Adam([theta], lr=0.05)
    for _ in range(1500):
        leaf = theta.clone().requires_grad_()
        score = torch.autograd.grad(log_posterior(leaf).sum(), leaf)[0]
        theta.grad = -svgd_direction(theta, score)
        adam.step()

    rng = torch.Generator().manual_seed(9)
    chains = torch.zeros(200, 2, dtype=torch.float64)  # 200 Metropolis chains side by side
    kept = []
    for step in range(1500):
        proposal = chains + 0.5 * torch.randn(200, 2, generator=rng, dtype=torch.float64)
        accept = torch.rand(200, generator=rng, dtype=torch.float64).log() < log_posterior(
            proposal
        ) - log_posterior(chains)
        chains = torch.where(accept[:, None], proposal, chains)
        if step >= 300:
            kept.append(chains)
    samples = torch.cat(kept)
    torch.testing.assert_close(theta.mean(0), samples.mean(0), atol=0.05, rtol=0)
    torch.testing.assert_close(theta.std(0), samples.std(0), atol=0, rtol=0.2)
