"""Exact Gaussian-process regression by Cholesky, for a batch of independent trials.

There are two forms of one model. With a kernel matrix K the work is n-dimensional; with features Φ such
that K = ΦΦᵀ the same posterior can be had from the 2R weights of the features, at a cost that grows
linearly with n. The two agree by the matrix inversion and determinant lemmas.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

JITTERS = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2)  # tried in turn, relative to the mean of the diagonal


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factors of `[..., n, n]`, with as little added to the diagonal as works.

    Only the matrices that fail are touched, each with its own jitter, so that a matrix has the same factor
    whatever it is batched with. Adding anything is a warning; failing at every jitter is an error.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor
    if not torch.isfinite(matrix).all():
        raise ValueError("a kernel matrix is not finite: look for huge or missing inputs, or lower lr")
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]  # ... 1 1
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jitter = torch.zeros_like(size)
    for step in JITTERS:
        jitter = torch.where(info[..., None, None] > 0, step * size, jitter)
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * eye)
        if not info.any():
            added = f"{float(jitter.max()):.0e}"
            warnings.warn(f"a kernel matrix was singular: added {added} to its diagonal", stacklevel=2)
            return factor
    raise ValueError("a kernel matrix is not positive definite: raise the noise, or remove duplicate rows")


class _SolveSPD(torch.autograd.Function):
    """M⁻¹b, log det M and M⁻¹ of symmetric positive definite M, with gradients that are matrix products.

    d(M⁻¹b) = -M⁻¹ dM M⁻¹b + M⁻¹ db, d log det M = tr(M⁻¹ dM), d(M⁻¹) = -M⁻¹ dM M⁻¹: with M⁻¹ at hand the
    backward pass costs less than differentiating through the Cholesky factor.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        factor = cholesky(matrix)  # T n n
        inverse = torch.cholesky_inverse(factor)  # T n n
        x = torch.cholesky_solve(b.unsqueeze(-1), factor).squeeze(-1)  # T n
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # T
        ctx.save_for_backward(x, inverse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(factor)
        return x, log_det, inverse, factor

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x: Tensor | None, grad_log_det: Tensor | None, grad_inverse: Tensor | None, _: None
    ) -> tuple[Tensor, Tensor | None]:
        x, inverse = ctx.saved_tensors
        grad_b = None
        grad_matrix = (
            torch.zeros_like(inverse) if grad_log_det is None else grad_log_det[:, None, None] * inverse
        )
        if grad_x is not None:
            grad_b = (inverse @ grad_x.unsqueeze(-1)).squeeze(-1)  # T n
            grad_matrix.baddbmm_(grad_b.unsqueeze(-1), x.unsqueeze(-2), alpha=-1)
        if grad_inverse is not None:
            grad_matrix -= inverse @ grad_inverse @ inverse
        return grad_matrix, grad_b


@dataclass(frozen=True)
class Posterior:
    """A GP conditioned on n labelled points, in function space or in weight space.

    With M = K + σ²I `[T, n, n]` or A = I + ΦᵀΦ/σ² `[T, 2R, 2R]`: `coefficients` are M⁻¹y `[T, n]` or the mean
    of the weights `[T, 2R]`, `factor` is the Cholesky factor of M or A, `inverse` its inverse and `matrix`
    itself (both for training, else None), and `nll` `[T]` the negative log marginal likelihood. A new point
    comes in as its row of kernel values with the labelled points (function space) or of features (weight
    space).
    """

    coefficients: Tensor
    factor: Tensor
    inverse: Tensor | None
    nll: Tensor
    weight_space: bool
    matrix: Tensor | None = None

    def mean(self, rows: Tensor) -> Tensor:
        """Posterior means `[T, q]` from rows `[T, q, n or 2R]`."""
        return (rows @ self.coefficients.unsqueeze(-1)).squeeze(-1)

    def variance(self, rows: Tensor, prior: Tensor) -> Tensor:
        """Posterior variances `[T, q]` of the function (no noise) from rows and the prior k** `[T, q]`."""
        whitened = torch.linalg.solve_triangular(self.factor, rows.transpose(-1, -2), upper=False)  # T n q
        form = whitened.square().sum(-2)
        if self.weight_space:  # φᵀA⁻¹φ holds the features' own prior |φ|²; add what `prior` has beyond it
            return form + (prior - rows.square().sum(-1))
        return prior - form


def condition_on_kernel(kernel: Tensor, y: Tensor, noise: Tensor) -> Posterior:
    """Function space: condition on targets y with noise variance σ² (equation 7).

    Args:
        kernel: `[T, n, n]` kernel matrices K.
        y: `[T, n]`.
        noise: `[T]` noise variances.
    """
    n = y.shape[-1]
    eye = torch.eye(n, dtype=kernel.dtype, device=kernel.device)
    matrix = kernel + noise[:, None, None] * eye
    alpha, log_det, inverse, factor = _SolveSPD.apply(matrix, y)
    nll = 0.5 * ((y * alpha).sum(-1) + log_det + n * math.log(2 * math.pi))
    return Posterior(alpha, factor, inverse, nll, weight_space=False, matrix=matrix)


def condition_on_features(features: Tensor, y: Tensor, noise: Tensor) -> Posterior:
    """Weight space: the same as `condition_on_kernel(ΦΦᵀ, y, σ²)`, at a cost linear in n.

    With A = I + ΦᵀΦ/σ², the weights have mean w = A⁻¹Φᵀy/σ² and covariance A⁻¹ (Woodbury), and
    log det(ΦΦᵀ + σ²I) = log det A + n log σ² (matrix determinant lemma).

    Args:
        features: `[T, n, 2R]` features Φ of the labelled points.
        y: `[T, n]`.
        noise: `[T]` noise variances.
    """
    n, width = features.shape[-2:]
    transposed = features.transpose(-1, -2)  # T 2R n
    eye = torch.eye(width, dtype=features.dtype, device=features.device)
    gram = eye + transposed @ features / noise[:, None, None]  # T 2R 2R
    projected = (transposed @ y.unsqueeze(-1)).squeeze(-1) / noise.unsqueeze(-1)  # T 2R
    weights, log_det, inverse, factor = _SolveSPD.apply(gram, projected)
    residual = y - (features @ weights.unsqueeze(-1)).squeeze(-1)  # T n
    # yᵀ(ΦΦᵀ + σ²I)⁻¹y as a sum of squares, which cannot cancel
    quadratic = residual.square().sum(-1) / noise + weights.square().sum(-1)  # T
    nll = 0.5 * (quadratic + log_det + n * (noise.log() + math.log(2 * math.pi)))
    return Posterior(weights, factor, inverse, nll, weight_space=True, matrix=gram)


def gaussian_nll(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """-log N(y; mean, variance), elementwise (appendix C.1); the variance is that of y, noise included."""
    return 0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))
