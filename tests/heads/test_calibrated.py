"""The calibrated preset: its gradients, its closed form, and the lengthscale it believes in."""

import numpy as np
import pytest
import torch

from fewshot_dpkl import DPKL, CalibratedDPKLHead, DPKLHead, EpisodeSampler, evaluate, fit_lengthscale
from fewshot_dpkl.heads import head_for
from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.heads.calibrated import PRECISIONS, TYPICAL, leave_one_out_precision
from fewshot_dpkl.heads.training.particle import directions, look_at_kernels
from fewshot_dpkl.heads.training.similarity import FreeClassWeights
from fewshot_dpkl.particles import svgd_direction
from tests.conftest import cluster_features
from tests.heads.test_heads import task


def double(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_directions_agree_with_autograd():
    inputs, targets = double(2, 4, 5), one_hot(torch.arange(8).view(2, 4) % 3, torch.float64)
    theta, mean = double(2, 6, 3, 5, seed=1).requires_grad_(), double(2, 1, 3, 5, seed=2)
    distances = (inputs[:, :, None, None] - theta[:, None]).square().sum(-1)  # E b P C
    log_rho = (-distances / 2).log_softmax(-1)
    log_posterior = 3 * (log_rho * targets[:, :, None]).sum() - 0.4 * (theta - mean).square().sum()
    score = torch.autograd.grad(log_posterior, theta)[0]
    with torch.no_grad():
        mixing = look_at_kernels(theta, None, prior=0.4)
        points = inputs[:, :, None]
        settings = dict(n=12, prior=0.4, prior_mean=mean, layered=False)
        nothing, ours = directions(points, targets, theta, FreeClassWeights(), mixing, **settings)
    assert nothing is None
    expected = -svgd_direction(theta.detach().flatten(2), score.flatten(2)).view_as(theta)
    torch.testing.assert_close(ours, expected)


def gaussian_classes(x, y, xq, variance):
    """softmax_c -|x - mean_c|² / (2 variance) on unit vectors, one query at a time."""
    x, xq = (a.astype(np.float64) / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, xq))
    rows = []
    for q in xq:
        scores = np.array([-((q - x[y == c].mean(0)) ** 2).sum() / (2 * variance) for c in np.unique(y)])
        scores = np.exp(scores - scores.max())
        rows.append(scores / scores.sum())
    return np.array(rows)


@pytest.mark.parametrize("dimension", [8, 60])
def test_particles_that_stay_at_the_class_means_are_gaussian_classes(dimension):
    x, y, xq, _ = task(dimension=dimension, shot=4)
    head = CalibratedDPKLHead(spread=0.03, shot_noise=0.08, particles=1, learning_rate=1e-12, diversity=0.0)
    expected = gaussian_classes(x, y, xq, 0.03 + 0.08 / 4)
    np.testing.assert_allclose(head.fit(x, y).predict_proba(xq), expected, atol=1e-5)


def test_the_prior_holds_the_particles_at_the_class_means():
    x, y, xq, _ = task(spread=1.0)
    shifts = []
    for prior in (0.4, 40.0):
        head = CalibratedDPKLHead(spread=0.03, shot_noise=0.0, prior=prior, steps=200, learning_rate=0.1)
        shifts.append(np.abs(head.fit(x, y).predict_proba(xq) - gaussian_classes(x, y, xq, 0.03)).max())
    assert shifts[1] < 0.5 * shifts[0]
    assert shifts[0] > 0.01


def test_leave_one_out_agrees_with_leaving_out():
    rng = np.random.default_rng(0)
    y = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])  # the last one cannot be left out
    x = rng.normal(size=(10, 6)) * 0.2 + np.eye(4, 6)[y] * 0.4
    log_posterior = []
    for precision in PRECISIONS.double().numpy():
        total = -0.5 * ((np.log(precision) - np.log(TYPICAL)) / 0.5) ** 2
        for i in range(9):
            kept = np.arange(10) != i
            means = [x[kept & (y == c)].mean(0) for c in range(4)]
            scores = np.array([-precision * ((x[i] - mean) ** 2).sum() / 2 for mean in means])
            total += scores[y[i]] - np.log(np.exp(scores).sum())
        log_posterior.append(total)
    weights = np.exp(np.array(log_posterior) - max(log_posterior))
    expected = np.exp((weights * np.log(PRECISIONS.numpy())).sum() / weights.sum())
    ours = leave_one_out_precision(torch.tensor(x)[None], torch.tensor(y)[None])
    assert float(ours) == pytest.approx(expected, rel=1e-5)


def test_one_example_per_class_leaves_the_typical_lengthscale():
    x, y, _, _ = task(shot=1)
    ours = leave_one_out_precision(torch.tensor(x)[None], torch.tensor(y)[None])
    assert float(ours) == pytest.approx(TYPICAL, rel=0.01)


def test_the_fitted_lengthscale_has_the_least_loss():
    features = cluster_features(spread=1.5)
    found = fit_lengthscale(features, (1, 5), episodes=60)

    def loss(**changed):
        total = 0.0
        for shot in (1, 5):
            sampler = EpisodeSampler(features, way=5, shot=shot, query=16)
            head = CalibratedDPKLHead(**{**found, **changed}, particles=1, diversity=0.0, learning_rate=1e-12)
            total += evaluate({"h": head}, features, sampler, 60)["h"].nll.mean()
        return total

    best = loss()
    for name, value in found.items():
        for factor in (0.4, 2.5):
            assert loss(**{name: value * factor}) > best - 1e-3


def test_presets_and_cards():
    assert isinstance(DPKL(), DPKLHead)
    assert DPKL("paper", epochs=3).epochs == 3
    assert isinstance(DPKL(preset="calibrated"), CalibratedDPKLHead)
    with pytest.raises(ValueError, match="there is no preset 'best'; choose from paper, calibrated"):
        DPKL("best")
    card = {"lengthscale": {"spread": 0.01, "shot_noise": 0.2}}
    assert head_for("dpkl-calibrated", card).shot_noise == 0.2
    assert head_for("dpkl-calibrated", None).spread is None
    assert isinstance(head_for("dpkl", card), DPKLHead)
    x, y, _, _ = task()
    with pytest.raises(ValueError, match="give both or neither"):
        CalibratedDPKLHead(spread=0.1).fit(x, y)
