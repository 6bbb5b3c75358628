"""The exact-GP core against gpytorch, scikit-learn, finite differences and independent algebra."""

from __future__ import annotations

import math
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from fewshot_dpkl.kernels import fourier_features, mean_embedding, random_frequencies, squared_exponential
from fewshot_dpkl.regression.gp import (
    _SolveSPD,
    cholesky,
    condition_on_features,
    condition_on_kernel,
    gaussian_nll,
)

torch.manual_seed(0)


def problem(trials=3, n=20, q=7, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(trials, n, d, generator=generator, dtype=torch.float64)
    y = torch.randn(trials, n, generator=generator, dtype=torch.float64)
    new = torch.randn(trials, q, d, generator=generator, dtype=torch.float64)
    return x, y, new


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4])
def test_agrees_with_scikit_learn(noise):
    x, y, new = problem()
    posterior = condition_on_kernel(
        squared_exponential(x, x), y, torch.full((3,), noise, dtype=torch.float64)
    )
    rows = squared_exponential(new, x)
    mean, variance = posterior.mean(rows), posterior.variance(rows, torch.ones(3, 7, dtype=torch.float64))
    for trial in range(3):
        reference = GaussianProcessRegressor(RBF(1.0), alpha=noise, optimizer=None).fit(x[trial], y[trial])
        expected_mean, expected_std = reference.predict(new[trial], return_std=True)
        np.testing.assert_allclose(mean[trial], expected_mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(variance[trial], expected_std**2, atol=1e-6)
        likelihood = reference.log_marginal_likelihood_value_
        assert -float(posterior.nll[trial]) == pytest.approx(likelihood, rel=1e-6)


class _Reference(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("noise", [1.0, 1e-2])
def test_agrees_with_gpytorch(noise):
    x, y, new = problem(trials=1)
    posterior = condition_on_kernel(squared_exponential(x, x), y, torch.tensor([noise], dtype=torch.float64))
    rows = squared_exponential(new, x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = noise
    reference = _Reference(x[0], y[0], likelihood).double()
    reference.covar_module.lengthscale = 1.0
    reference.train()
    with torch.no_grad():
        total = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, reference)(reference(x[0]), y[0]) * 20
        reference.eval()
        with gpytorch.settings.fast_computations(False, False, False):
            prediction = reference(new[0])
            torch.testing.assert_close(posterior.mean(rows)[0], prediction.mean, rtol=1e-6, atol=1e-6)
            variance = posterior.variance(rows, torch.ones(1, 7, dtype=torch.float64))[0]
            torch.testing.assert_close(variance, prediction.variance, rtol=1e-6, atol=1e-6)
    assert float(posterior.nll) == pytest.approx(-float(total), rel=1e-6)


@pytest.mark.parametrize("n", [5, 30, 90])
@pytest.mark.parametrize("noise", [1.0, 1e-3])
def test_weight_space_is_function_space(n, noise):
    x, y, new = problem(n=n)
    frequencies = random_frequencies(2, 15, dtype=torch.float64)
    features, new_features = fourier_features(x, frequencies), 0.7 * fourier_features(new, frequencies)
    noise = torch.full((3,), noise, dtype=torch.float64)
    by_points = condition_on_kernel(features @ features.mT, y, noise)
    by_weights = condition_on_features(features, y, noise)
    rows = new_features @ features.mT
    torch.testing.assert_close(by_weights.nll, by_points.nll, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(by_weights.mean(new_features), by_points.mean(rows), rtol=1e-7, atol=1e-8)
    for prior in (new_features.square().sum(-1), torch.ones(3, 7, dtype=torch.float64)):
        expected = by_points.variance(rows, prior)
        torch.testing.assert_close(by_weights.variance(new_features, prior), expected, rtol=1e-6, atol=1e-9)


def test_proposition_2_posterior_variance_is_the_distance_to_the_labelled_span():
    """Noise-free: |ω - its least-squares projection on the labelled mean embeddings|², by lstsq."""
    generator = torch.Generator().manual_seed(1)
    labelled = torch.randn(1, 5, 8, 2, generator=generator, dtype=torch.float64)  # T m n d
    unlabelled = torch.randn(1, 5, 30, 2, generator=generator, dtype=torch.float64)
    frequencies = random_frequencies(2, 50, generator=generator, dtype=torch.float64)
    span, points = mean_embedding(labelled, frequencies)[0], mean_embedding(unlabelled, frequencies)[0]
    solution = np.linalg.lstsq(span.numpy().T, points.numpy().T, rcond=None)[0]  # n q
    distance = np.square(points.numpy() - solution.T @ span.numpy()).sum(-1)
    noise = torch.full((1,), 1e-12, dtype=torch.float64)
    prior = points.square().sum(-1)[None]
    in_functions = condition_on_kernel((span @ span.T)[None], torch.zeros(1, 8, dtype=torch.float64), noise)
    variance = in_functions.variance((points @ span.T)[None], prior)[0]
    assert distance.max() > 1e-3
    np.testing.assert_allclose(variance, distance, atol=1e-7)
    wrong = in_functions.variance((points @ span.T)[None], torch.ones_like(prior))[0]
    assert np.abs(wrong.numpy() - distance).max() > 0.1, "k** = 1 breaks the proposition"


def test_gradients_agree_with_finite_differences():
    root = torch.randn(2, 5, 5, dtype=torch.float64)
    matrix = (root @ root.mT + torch.eye(5)).requires_grad_()
    b = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def symmetric(m, b):  # finite differences move one entry: keep the matrix symmetric
        return _SolveSPD.apply((m + m.mT) / 2, b)[:3]

    assert torch.autograd.gradcheck(symmetric, (matrix, b))


def test_a_singular_matrix_gets_the_least_jitter_and_a_warning():
    regular, singular = torch.eye(3, dtype=torch.float64) * 2, torch.ones(3, 3, dtype=torch.float64)
    singular[0, 0] -= 1e-9  # not even semi-definite
    with pytest.warns(UserWarning, match="singular: added"):
        factor = cholesky(torch.stack([regular, singular]))
    torch.testing.assert_close(factor[0], torch.linalg.cholesky(regular), rtol=0, atol=0)
    torch.testing.assert_close(factor[1] @ factor[1].T, singular, rtol=0, atol=1e-7)


def test_a_matrix_that_cannot_be_saved_is_an_error():
    with pytest.raises(ValueError, match="not positive definite"):
        cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64))
    with pytest.raises(ValueError, match="not finite"):
        cholesky(torch.full((2, 2), torch.nan))


def test_duplicate_rows_are_no_trouble():
    x, y, new = problem(trials=1, n=10)
    x = torch.cat([x, x], dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = condition_on_kernel(squared_exponential(x, x), torch.cat([y, y], 1), torch.tensor([1e-2]))
    single = condition_on_kernel(squared_exponential(x[:, :10], x[:, :10]), y, torch.tensor([5e-3]))
    torch.testing.assert_close(
        posterior.mean(squared_exponential(new, x)), single.mean(squared_exponential(new, x[:, :10]))
    )


def test_gaussian_nll():
    y, mean, variance = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0])
    expected = 0.25 / 4 + 0.5 * math.log(2) + 0.5 * math.log(2 * math.pi)
    assert float(gaussian_nll(y, mean, variance)) == pytest.approx(expected)
