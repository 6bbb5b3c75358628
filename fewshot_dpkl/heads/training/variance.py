"""SSDPKL's regulariser (section 3.3): the mean posterior variance of unlabelled points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.training.particle import Training, activate

NOISE = 1e-2
"""Of the Gaussian process, against a kernel of at most 1: nearly the projection of proposition 2."""


def posterior_variance(labelled: Tensor, unlabeled: Tensor, lengthscale: float) -> Tensor:
    """σ² = k** - k*ᵀ(K + σ_η²I)⁻¹k* of bags of unit embeddings, `[E, n, m, d]` and `[E, u, m, d]`: `[E, u]`.

    k is the kernel of the mean embeddings, E_{l,l'} exp(-|z_l - z'_l'|² / 2ℓ²). By proposition 2 σ² is how
    far the embedding of an unlabelled point lies outside the span of the labelled ones.
    """
    prior = kernel(unlabeled[:, :, None], unlabeled[:, :, None], lengthscale)[..., 0, 0]  # E u
    across = kernel(labelled, unlabeled, lengthscale)  # E n u
    noise = NOISE * torch.eye(labelled.shape[1], dtype=across.dtype, device=across.device)
    factor = torch.linalg.cholesky(kernel(labelled, labelled, lengthscale) + noise)
    return prior - torch.linalg.solve_triangular(factor, across, upper=False).square().sum(-2)


def kernel(left: Tensor, right: Tensor, lengthscale: float) -> Tensor:
    """Of bags of m unit embeddings, `[..., n, m, d]` and `[..., u, m, d]`, over all pairs: `[..., n, u]`."""
    cosine = left.flatten(-3, -2) @ right.flatten(-3, -2).mT  # ... nm um
    pairs = ((cosine - 1) / lengthscale**2).exp()
    return pairs.unflatten(-1, right.shape[-3:-1]).unflatten(-3, left.shape[-3:-1]).mean((-3, -1))


@dataclass
class SemiSupervisedTraining(Training):
    """Training whose layers also descend α / n_u Σ σ² over unlabelled points.

    Args:
        alpha: α.
        lengthscale: ℓ of the kernel.
        looks: `[E, looks, b]`, the unlabelled points of a step, one look after the other, as row numbers of
            the layers' points, of which the labelled ones are the first.
    """

    alpha: float = 1.0
    lengthscale: float = 1.0
    looks: Tensor | None = None
    compiled = False

    @torch.enable_grad()
    def with_more(self, step: int, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        assert self.looks is not None
        assert self.mixing.layers is not None
        n = self.labels.shape[1]
        labelled = torch.arange(n, device=rows.device).expand(len(rows), -1)
        seen = torch.cat([labelled, self.looks[:, step % self.looks.shape[1]]], 1)  # E n+b
        hidden = self.layers.hidden(seen).detach().requires_grad_()
        z = activate(hidden, normalised=True)
        variance = posterior_variance(z[:, :n], z[:, n:], self.lengthscale).mean(1)  # E
        more = torch.autograd.grad(self.alpha * variance.sum(), hidden)[0]
        return torch.cat([rows, seen], 1), torch.cat([gradient, self.mixing.layers[:, None] @ more], 1)
