"""The semi-supervised term: the posterior variance of the unlabelled points (equation 14), and its gradient.

Thousands of unlabelled points go through every network in every step: here semi-supervised training
spends its time. Given the labelled points their variances are a plain sum, so they are taken one trial and
one cache-full at a time. The gradients are written by hand and computed in the same pass, while what they
need is still in the cache; the tests compare them with autograd and with finite differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fewshot_dpkl.kernels import half_squares, squared_exponential
from fewshot_dpkl.regression.gp import Posterior
from fewshot_dpkl.regression.model import Model

CACHE = 2**19  # numbers in the largest array of a piece: 2 MB in float32
WHOLE = 64  # the points of a piece are a multiple of this, so that no product has a rest of a few columns
BLOCK = 128  # rows of a symmetric product at a time, up to their end: the rest is known from the others
NEGLIGIBLE = 1e-12  # what a low-rank basis may leave of a variance of 1: the rounding of float32, squared


def total_variance(model: Model, embedded: Tensor, posterior: Posterior, unlabeled: Tensor) -> Tensor:
    """Σ σ²(x) over unlabelled inputs `[T, n_u, D]`: `[T]`, differentiable in all that is learnt.

    Args:
        embedded: the labelled points, from `model.embed`.
        posterior: conditioned on them, with its inverse.
    """
    assert posterior.inverse is not None
    assert posterior.matrix is not None
    dtype = unlabeled.dtype
    terms: list[_FeatureTerm | _KernelTerm] = []
    if model.frequencies is None:
        given = [embedded, posterior.matrix]
        basis = _basis(posterior.matrix.detach(), model.log_noise.detach().exp(), embedded.shape[-1])
        for t, latent in enumerate(embedded.detach().to(dtype)):
            terms.append(_KernelTerm(latent, posterior.inverse[t].detach(), basis[t], model.prior == "own"))
    else:  # σ² = μᵀBμ, B = A⁻¹ in weight space, I - ΦᵀM⁻¹Φ in function space; a unit prior adds 1 - |μ|²
        eye = torch.eye(embedded.shape[-1], dtype=embedded.dtype, device=embedded.device)
        form = posterior.inverse
        if not posterior.weight_space:
            form = eye - embedded.mT @ form @ embedded
        given = [form - eye if model.prior == "unit" else form]
        terms += map(_FeatureTerm, model.frequencies.to(dtype), given[0].detach().to(dtype))
    total = _TotalVariance.apply(model, unlabeled, terms, model.parameters, model.log_lengthscale, *given)
    return total + unlabeled.shape[-2] if model.prior == "unit" else total


class _TotalVariance(torch.autograd.Function):
    """Value and gradients in one pass over the points; `backward` has only to scale the gradients.

    `terms` are the trials' sums; the gradients that they return are those in `given`.
    """

    @staticmethod
    def forward(
        ctx: Any, model: Model, unlabeled: Tensor, terms: Sequence[_FeatureTerm | _KernelTerm],
        parameters: Tensor, log_lengthscale: Tensor, *given: Tensor,
    ) -> Tensor:  # fmt: skip
        grad_parameters, grad_lengthscale = torch.zeros_like(parameters), torch.zeros_like(log_lengthscale)
        particles = parameters.shape[1]
        totals, grads_given = [], []
        for t, term in enumerate(terms):
            shrink = (-log_lengthscale[t]).exp()
            width = particles * max(term.width, model.embedding.width)
            for piece in unlabeled[t].split(max(1, CACHE // (width * WHOLE)) * WHOLE):
                layers = model.embedding.forward(parameters[t], piece.T.expand(particles, -1, -1))
                latent = layers[-1] * shrink  # m d c
                grad = term.add(latent)
                grad_lengthscale[t] -= (grad * latent).sum()
                grad_parameters[t] += model.embedding.backward(parameters[t], layers, grad.mul_(shrink))
            total, *grads = term.finish()
            totals.append(total)
            grads_given.append(grads)
        stacked = [torch.stack(grads).to(given[0]) for grads in zip(*grads_given, strict=True)]
        ctx.save_for_backward(grad_parameters, grad_lengthscale, *stacked)
        return torch.stack(totals).to(given[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [g * grad.to(g.dtype).view(-1, *[1] * (g.dim() - 1)) for g in ctx.saved_tensors]
        return None, None, None, *scaled


class _FeatureTerm:
    """Σ μᵀBμ over mean embeddings μ `[2R]`, for frequencies `[R, d]` and symmetric B `[2R, 2R]`."""

    def __init__(self, frequencies: Tensor, form: Tensor) -> None:
        self.frequencies, self.form, self.gram = frequencies, form, torch.zeros_like(form)
        self.width = len(frequencies)

    def add(self, latent: Tensor) -> Tensor:
        """Take in latent points `[m, d, c]`; returns the gradient in them."""
        m, r = len(latent), self.width
        scale = 1 / (m * r**0.5)
        v = self.frequencies.expand(m, -1, -1)  # m R d
        phase = torch.bmm(v, latent)  # m R c
        cosine, sine = phase.cos(), phase.sin_()
        mean = torch.cat([cosine.sum(0), sine.sum(0)]).mul_(scale)  # 2R c
        _add_outer(self.gram, mean)
        grad = torch.mm(self.form, mean).mul_(2 * scale)
        grad_phase = cosine.mul_(grad[r:]).addcmul_(sine, grad[:r], value=-1)
        return torch.bmm(v.mT, grad_phase)  # m d c

    def finish(self) -> tuple[Tensor, Tensor]:
        """The sum, and its gradient in B."""
        gram = _mirrored(self.gram)
        return (self.form * gram).sum(dtype=torch.float64), gram


class _KernelTerm:
    """Σ k** - kᵀM⁻¹k, k the closed-form kernel with labelled latent points `[m, n, d]`, M⁻¹ `[n, n]`.

    With an orthonormal `basis` Q `[n, s]` of the kernel matrix, k is QQᵀk to rounding: the products with M⁻¹
    `[n, n]` become products with M⁻¹Q `[n, s]`.
    """

    def __init__(self, labelled: Tensor, inverse: Tensor, basis: Tensor | None, own_prior: bool) -> None:
        self.m, self.n, _ = labelled.shape
        self.width = self.m * self.n
        self.labelled = labelled.flatten(0, 1)  # mn d
        self.basis = None if basis is None else basis.to(labelled)
        self.exact_solve = inverse if basis is None else inverse @ basis  # n s
        self.solve = self.exact_solve.to(labelled)
        self.gram = labelled.new_zeros(self.solve.shape[1], self.solve.shape[1])
        self.grad_labelled = torch.zeros_like(self.labelled)
        self.prior, self.own_prior = labelled.new_zeros((), dtype=torch.float64), own_prior
        ones = torch.ones_like(self.labelled[:, :1])
        # (z, 1, -|z|²/2)·(z', -|z'|²/2, 1) = -|z - z'|²/2
        self.left = torch.cat([self.labelled, ones, half_squares(self.labelled)], 1)  # mn d+2
        self.moments = torch.cat([self.labelled, ones], 1).T.contiguous()  # d+1 mn

    def add(self, latent: Tensor) -> Tensor:
        """Take in latent points `[m, d, c]`; returns the gradient in them."""
        m, d, c = latent.shape
        points = latent.transpose(0, 1).flatten(1)  # d mc
        ones = torch.ones_like(points[:1])
        pairs = (self.left @ torch.cat([points, half_squares(points, 0), ones])).clamp_max_(0).exp_()  # mn mc
        bags = pairs.view(m, self.n, m, c)
        rows = bags.mean((0, 2)) if m > 1 else pairs  # n c
        inside = rows if self.basis is None else self.basis.T @ rows  # s c
        _add_outer(self.gram, inside)
        grad = (self.solve @ inside).mul_(-2 / m**2)  # of -kᵀM⁻¹k in the m² kernels of a pair: n c
        pull = bags.mul_(grad[:, None]).view_as(pairs)  # in their logarithms: mn mc
        moments = self.moments @ pull  # d+1 mc
        grad_points = (moments[:d] - moments[d] * points).unflatten(1, (m, c)).transpose(0, 1)  # m d c
        moments = pull @ torch.cat([points, ones]).T  # mn d+1
        self.grad_labelled += moments[:, :d] - moments[:, d:] * self.labelled
        return self._add_prior(latent, grad_points) if self.own_prior else grad_points

    def _add_prior(self, latent: Tensor, grad: Tensor) -> Tensor:
        """k** of a point is the mean kernel between its own m latent points."""
        m, _, c = latent.shape
        if m == 1:  # k(z, z) = 1
            self.prior += c
            return grad
        bags = latent.permute(2, 0, 1)  # c m d
        pairs = squared_exponential(bags, bags) / m**2  # c m m
        self.prior += pairs.sum(dtype=torch.float64)
        return grad + 2 * (pairs @ bags - pairs.sum(-1, keepdim=True) * bags).permute(1, 2, 0)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sum, and its gradients in the labelled latent points and in M.

        The latter is M⁻¹ Σkkᵀ M⁻¹, in which large numbers cancel: in the precision of M⁻¹.
        """
        form = self.solve if self.basis is None else self.basis.T @ self.solve  # s s
        gram = _mirrored(self.gram)
        total = self.prior - (form * gram).sum(dtype=torch.float64)
        grad_labelled = self.grad_labelled.unflatten(0, (self.m, self.n)).to(self.exact_solve)
        return total, grad_labelled, self.exact_solve @ gram.to(self.exact_solve) @ self.exact_solve.T


def _add_outer(gram: Tensor, points: Tensor) -> None:
    """Add Σ ppᵀ over the columns of `points` `[s, c]` to `gram` `[s, s]`; above the diagonal only in part."""
    for begin in range(0, len(points), BLOCK):
        end = begin + BLOCK
        gram[begin:end, :end].addmm_(points[begin:end], points[:end].T)


def _mirrored(gram: Tensor) -> Tensor:
    """The symmetric matrix of which `gram` has the lower triangle."""
    return gram.tril() + gram.tril(-1).T


def _basis(matrix: Tensor, noise: Tensor, dimension: int) -> Sequence[Tensor | None]:
    """Each trial's basis of the kernel in K + σ²I `[T, n, n]`; points in many dimensions have none."""
    basis = None
    if dimension <= 3:
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        basis = low_rank_basis(matrix - noise[:, None, None] * eye)
    return [None] * len(matrix) if basis is None else list(basis)


@torch.no_grad()
def low_rank_basis(kernel: Tensor) -> Tensor | None:
    """Orthonormal Q `[T, n, s]` with QQᵀK = K `[T, n, n]` to rounding, by pivoted Cholesky; None if s > n/3.

    The kernel of points in a plane has a rank far below n. Its columns are taken until they leave at most
    `NEGLIGIBLE` of the diagonal; of the kernel with any new point they then leave at most the root of that.
    """
    trials = torch.arange(len(kernel), device=kernel.device)
    left = kernel.diagonal(dim1=-2, dim2=-1).clone()  # T n
    columns = kernel.new_zeros(*left.shape, left.shape[-1] // 3)  # T n s
    for s in range(columns.shape[-1]):
        most, pivot = left.max(-1)
        if (most <= NEGLIGIBLE).all():
            return torch.linalg.qr(columns[..., :s]).Q
        known = (columns[..., :s] @ columns[trials, pivot, :s].unsqueeze(-1)).squeeze(-1)
        column = (kernel[trials, pivot] - known) / most.clamp_min(NEGLIGIBLE).sqrt().unsqueeze(-1)
        columns[..., s] = column
        left = (left - column.square()).clamp_min_(0)
    return None
