from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from sklearn.metrics.pairwise import rbf_kernel

from fewshot_dpkl.kernels import (
    fourier_features,
    hadamard_frequencies,
    hadamard_scales,
    mean_embedding,
    mean_embedding_kernel,
    random_frequencies,
    squared_exponential,
)


def unit_points(*shape: int) -> torch.Tensor:
    points = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return points / points.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("lengthscale", [0.3, 1.0, 2.5])
def test_squared_exponential_agrees_with_scikit_learn(lengthscale):
    a, b = unit_points(2, 7, 5), unit_points(2, 4, 5) * 2
    ours = squared_exponential(a, b, lengthscale)
    for i in range(2):
        np.testing.assert_allclose(
            ours[i], rbf_kernel(a[i], b[i], gamma=1 / (2 * lengthscale**2)), atol=1e-12
        )


def frequencies(kind: str, dimension: int, number: int, lengthscale: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "hadamard":
        scales = hadamard_scales(dimension, number, lengthscale=lengthscale, generator=generator)
        return hadamard_frequencies(scales.double())
    return random_frequencies(
        dimension,
        number,
        orthogonal=kind == "orthogonal",
        lengthscale=lengthscale,
        generator=generator,
        dtype=torch.float64,
    )


def kernel_error(number: int, kind: str, draws: int = 60) -> float:
    """Root mean square error of the random-feature kernel on a fixed set of points."""
    points = unit_points(12, 16) * 1.5
    exact = squared_exponential(points, points, 1.3)
    errors = []
    for seed in range(draws):
        v = frequencies(kind, 16, number, 1.3, seed)
        f = fourier_features(points, v)
        errors.append((f @ f.T - exact).square().mean())
    return float(torch.stack(errors).mean().sqrt())


@pytest.mark.parametrize("kind", ["plain", "orthogonal", "hadamard"])
def test_kernel_error_falls_with_the_square_root_of_the_number_of_features(kind):
    errors = [kernel_error(number, kind) for number in (32, 128, 512)]
    for coarse, fine in pairwise(errors):
        assert coarse / fine == pytest.approx(2, rel=0.15)  # four times the features, half the error


@pytest.mark.parametrize("kind", ["orthogonal", "hadamard"])
@pytest.mark.parametrize("number", [16, 64, 256])
def test_orthogonal_features_are_no_worse_than_plain_ones(number, kind):
    assert kernel_error(number, kind) <= kernel_error(number, "plain")


@pytest.mark.parametrize("kind", ["orthogonal", "hadamard"])
def test_orthogonal_frequencies_are_orthogonal_in_blocks_and_have_chi_lengths(kind):
    v = frequencies(kind, 32, 4000 // 32 * 32, 0.5, seed=1)
    assert v.shape == (4000, 32)
    for block in v.split(32)[:2]:
        block = block / block.norm(dim=1, keepdim=True)
        torch.testing.assert_close(block @ block.T, torch.eye(32, dtype=torch.float64), atol=1e-6, rtol=0)
    assert float((v * 0.5).square().sum(1).mean()) == pytest.approx(32, rel=0.02)  # E chi²(d) = d
    assert (v.split(32)[0] - v.split(32)[1]).abs().min(1).values.max() > 0  # blocks of their own


def test_hadamard_frequencies_are_products_of_signs_and_scipys_hadamard_matrix():
    scales = hadamard_scales(8, 24, generator=torch.Generator().manual_seed(3)).double()
    assert (scales[:, :3].abs() == 1).all()
    h = torch.tensor(hadamard(8)).double()
    blocks = [s[3].diag() @ h @ s[2].diag() @ h @ s[1].diag() @ h @ s[0].diag() for s in scales]
    torch.testing.assert_close(hadamard_frequencies(scales), torch.cat(blocks))


@pytest.mark.parametrize(("dimension", "number"), [(12, 24), (8, 20)])
def test_hadamard_frequencies_come_in_whole_blocks_of_a_power_of_two(dimension, number):
    with pytest.raises(ValueError, match="a multiple of a power of two"):
        hadamard_scales(dimension, number)


def test_features_have_unit_length_and_any_batch_shape():
    v = random_frequencies(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = fourier_features(torch.randn(3, 2, 4, 6, dtype=torch.float64), v)
    assert f.shape == (3, 2, 4, 100)
    torch.testing.assert_close(f.norm(dim=-1), torch.ones(3, 2, 4, dtype=torch.float64))


def test_mean_embedding_kernel_is_the_mean_over_all_pairs_of_particles():
    a, b = unit_points(2, 3, 4, 5), unit_points(2, 6, 2, 5)  # E m n d, E m' k d
    naive = torch.zeros(2, 4, 2, dtype=torch.float64)
    for e in range(2):
        for i in range(4):
            for j in range(2):
                values = [
                    torch.exp(-(za - zb).square().sum() / (2 * 0.7**2))
                    for za in a[e, :, i]
                    for zb in b[e, :, j]
                ]
                naive[e, i, j] = torch.stack(values).mean()
    torch.testing.assert_close(mean_embedding_kernel(a, b, 0.7), naive)


def test_random_feature_form_tends_to_the_closed_form():
    a, b = unit_points(3, 4, 5), unit_points(3, 2, 5) + 0.1
    v = random_frequencies(5, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    approximate = mean_embedding(a, v) @ mean_embedding(b, v).T
    torch.testing.assert_close(approximate, mean_embedding_kernel(a, b), atol=0.01, rtol=0)
