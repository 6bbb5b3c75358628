"""Kernels between points and between probabilistic embeddings (section 3.1 of the paper).

A *probabilistic embedding* of a point is the bag of its m latent vectors, one from each particle of
the network; tensors put the particles before the points: `[..., m, n, d]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances between the rows of `a` `[..., n, d]` and `b` `[..., k, d]`: `[..., n, k]`."""
    a_norms = a.square().sum(-1).unsqueeze(-1)  # ... n 1
    b_norms = b.square().sum(-1).unsqueeze(-2)  # ... 1 k
    return (a_norms + b_norms - 2 * a @ b.transpose(-1, -2)).clamp_min(0)


def squared_exponential(a: Tensor, b: Tensor, lengthscale: float | Tensor = 1.0) -> Tensor:
    """k(z, z') = exp(-|z - z'|² / (2 ℓ²)) between the rows of `a` `[..., n, d]` and `b` `[..., k, d]`."""
    return _SquaredExponential.apply(a / lengthscale, b / lengthscale)


def half_squares(points: Tensor, dim: int = -1) -> Tensor:
    """-|z|²/2 with `dim`, that of the coordinates, kept."""
    return points.square().sum(dim, keepdim=True).mul_(-0.5)


class _SquaredExponential(torch.autograd.Function):
    """exp(-|z - z'|² / 2), its gradient from the kernel itself: autograd would keep every step to it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        # (z, -|z|²/2, 1)·(z', 1, -|z'|²/2) = -|z - z'|²/2
        left = torch.cat([a, half_squares(a), torch.ones_like(a[..., :1])], -1)
        right = torch.cat([b, torch.ones_like(b[..., :1]), half_squares(b)], -1)
        kernel = (left @ right.mT).clamp_max_(0).exp_()
        ctx.save_for_backward(a, b, kernel)
        return kernel

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b, kernel = ctx.saved_tensors
        pull = grad * kernel  # in the logarithm
        return (
            pull @ b - pull.sum(-1, keepdim=True) * a if ctx.needs_input_grad[0] else None,
            pull.mT @ a - pull.sum(-2).unsqueeze(-1) * b if ctx.needs_input_grad[1] else None,
        )


def random_frequencies(
    dimension: int,
    number: int,
    *,
    orthogonal: bool = False,
    lengthscale: float = 1.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Frequencies V `[R, d]` of the squared-exponential kernel: every row is N(0, I / ℓ²).

    Plain rows are independent (Rahimi & Recht, 2007). Orthogonal rows (Yu et al., 2016) come in blocks
    S·Q / ℓ, with Q a random orthogonal matrix and S a diagonal of independent chi(d) lengths: the same
    distribution of each row, so the kernel estimate stays unbiased, but rows of a block do not repeat
    each other's direction, which lowers its variance.
    """

    def gaussian() -> Tensor:
        return torch.randn(dimension, dimension, generator=generator, dtype=dtype)

    if not orthogonal:
        return torch.randn(number, dimension, generator=generator, dtype=dtype) / lengthscale
    blocks = []
    for _ in range(-(-number // dimension)):
        q, r = torch.linalg.qr(gaussian())
        q = q * r.diagonal().sign()  # uniform over the orthogonal group, not only over QR's signs
        lengths = gaussian().norm(dim=-1, keepdim=True)  # chi(d)
        blocks.append(lengths * q)
    return torch.cat(blocks)[:number] / lengthscale


def hadamard_scales(
    dimension: int, number: int, *, lengthscale: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Orthogonal frequencies whose rotations are products of few numbers: `[R / d, 4, d]`.

    A block is V = S₃HS₂HS₁HS₀ (SORF; Yu et al., 2016), with H Hadamard's matrix of ±1 and S_i diagonal:
    random signs, and in S₃ chi(d) lengths as in `random_frequencies`. A vector is multiplied by it in
    d log d additions; `hadamard_frequencies` writes it out.

    Args:
        dimension: d, a power of two.
        number: R, a multiple of d.
    """
    if dimension & (dimension - 1) or number % dimension:
        raise ValueError(
            f"{number} frequencies of {dimension} dimensions; expected a multiple of a power of two"
        )
    scales = torch.randn(number // dimension, 4, dimension, generator=generator).sign()
    lengths = torch.randn(*scales.shape[::2], dimension, generator=generator).norm(dim=-1)  # R/d d
    scales[:, 3] = lengths / (lengthscale * dimension**1.5)  # the length of HHH's rows
    return scales


def hadamard_matrix(dimension: int) -> Tensor:
    """H `[d, d]` of ±1, symmetric, with HH = d·I, for a power of two d."""
    if dimension < 1 or dimension & (dimension - 1):
        raise ValueError(f"Hadamard's matrix of {dimension} dimensions; expected a power of two")
    hadamard = torch.ones(1, 1)
    while len(hadamard) < dimension:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return hadamard


def hadamard_frequencies(scales: Tensor) -> Tensor:
    """V `[R, d]` of `hadamard_scales` `[R / d, 4, d]`."""
    hadamard = hadamard_matrix(scales.shape[-1]).to(scales)
    product = torch.diag_embed(scales[:, 0])
    for scale in scales[:, 1:].unbind(1):
        product = scale[..., None] * (hadamard @ product)
    return product.flatten(0, 1)


def fourier_features(z: Tensor, frequencies: Tensor) -> Tensor:
    """f(z) = R^(-1/2) [cos(Vz), sin(Vz)], so that f(z)·f(z') ≈ k(z, z').

    Args:
        z: `[..., d]` points.
        frequencies: `[R, d]`, from `random_frequencies`.

    Returns:
        `[..., 2R]` features of unit length.
    """
    phase = z @ frequencies.transpose(-1, -2)  # ... R
    return torch.cat([phase.cos(), phase.sin()], dim=-1) / frequencies.shape[-2] ** 0.5


def mean_embedding(z: Tensor, frequencies: Tensor) -> Tensor:
    """μ(x) = mean over particles of f(g_w(x)): `[..., m, n, d]` latent points to `[..., n, 2R]`.

    The same as `fourier_features(z, frequencies).mean(-3)`, in fewer passes over the `[..., m, n, R]` phases.
    """
    scale = z.shape[-3] * frequencies.shape[-2] ** 0.5
    return _SumOfWaves.apply(z @ frequencies.transpose(-1, -2)) / scale


class _SumOfWaves(torch.autograd.Function):
    """Phases `[..., m, n, R]` to the sums over m of their cosines and sines, `[..., n, 2R]`.

    Keeps the cosines and sines: each is the other's derivative, and autograd would compute them twice.
    """

    @staticmethod
    def forward(ctx: Any, phase: Tensor) -> Tensor:
        cosine, sine = phase.cos(), phase.sin()
        ctx.save_for_backward(cosine, sine)
        return torch.cat([cosine.sum(-3), sine.sum(-3)], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        cosine, sine = ctx.saved_tensors
        grad_cosine, grad_sine = grad.unsqueeze(-3).chunk(2, dim=-1)  # ... 1 n R
        return torch.addcmul(cosine * grad_sine, sine, grad_cosine, value=-1)  # ... m n R


def mean_embedding_kernel(a: Tensor, b: Tensor, lengthscale: float | Tensor = 1.0) -> Tensor:
    """The closed form of μ(x)·μ(x'): the mean of k over all pairs of particles (equation 2).

    Args:
        a: `[..., m, n, d]` latent points of n inputs.
        b: `[..., m', k, d]` latent points of k inputs.

    Returns:
        `[..., n, k]`.
    """
    m, n, _ = a.shape[-3:]
    m_other, k, _ = b.shape[-3:]
    if m == m_other == 1:
        return squared_exponential(a.squeeze(-3), b.squeeze(-3), lengthscale)
    pairs = squared_exponential(a.flatten(-3, -2), b.flatten(-3, -2), lengthscale)  # ... mn m'k
    return pairs.unflatten(-1, (m_other, k)).unflatten(-3, (m, n)).mean((-4, -2))
