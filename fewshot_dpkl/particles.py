"""Distributions held as particles, and the two ways to move them.

Functional gradient descent (Algorithm 1 of the paper) looks for the *distribution* of network weights
with the greatest likelihood; SVGD (Liu & Wang, 2016) for the posterior of the class weights. Both mix
the particles' gradients with a kernel κ between particles. Every function takes any leading batch
dimensions; a particle is one row of `[..., m, p]`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Bandwidth = Literal["paper", "liu-wang"]


def bandwidth(distances: Tensor, rule: Bandwidth = "paper") -> Tensor:
    """Median heuristic for κ = exp(-|w_i - w_j|² / h).

    `paper` is h = median / log m over the pairs of distinct particles; `liu-wang` is what Liu & Wang's
    experiments use, h = median / log(m + 1) over all m² entries, the zeros of the diagonal included.

    Args:
        distances: `[..., m, m]` squared distances, m ≥ 2.

    Returns:
        `[..., 1, 1]` bandwidths, never zero.
    """
    m = distances.shape[-1]
    ordered = distances.flatten(-2).sort(-1).values  # m zeros of the diagonal, then every pair twice
    if rule == "paper":
        first, count, divisor = m, m * (m - 1), math.log(m)
    elif rule == "liu-wang":
        first, count, divisor = 0, m * m, math.log(m + 1)
    else:
        raise ValueError(f"unknown bandwidth rule {rule!r}; use 'paper' or 'liu-wang'")
    middle = ordered[..., first + (count - 1) // 2 : first + count // 2 + 1]  # one or two entries
    median = middle.mean(-1, keepdim=True)
    return (median / divisor).clamp_min_(torch.finfo(distances.dtype).tiny ** 0.5)[..., None]


def particle_distances(particles: Tensor) -> Tensor:
    """Squared distances between the particles `[..., m, p]`: `[..., m, m]`, exactly zero on the diagonal."""
    return distances_from_products(particles @ particles.transpose(-1, -2))


def distances_from_products(products: Tensor) -> Tensor:
    """|w_i|² + |w_j|² - 2 w_i·w_j from the products w_i·w_j, both `[..., m, m]`."""
    norms = products.diagonal(dim1=-2, dim2=-1)
    distances = (norms[..., :, None] + norms[..., None, :]).sub_(products, alpha=2)
    return distances.clamp_min_(0)  # the diagonal is a + a - 2a, zero without rounding


def particle_kernel(distances: Tensor, rule: Bandwidth = "paper") -> tuple[Tensor, Tensor]:
    """κ `[..., m, m]` and its bandwidth h `[..., 1, 1]` from squared distances `[..., m, m]`."""
    if distances.shape[-1] == 1:  # one particle is only like itself
        return torch.ones_like(distances), torch.ones_like(distances)
    h = bandwidth(distances, rule)
    return (distances / -h).exp_(), h


@torch.no_grad()
def functional_gradient(particles: Tensor, gradients: Tensor, rule: Bandwidth = "paper") -> Tensor:
    """φ(w_i) = Σ_l κ(w_i, w_l) ∇_{w_l} L (Proposition 1), L one loss of all particles together.

    With one particle this is the plain gradient.

    Args:
        particles: `[..., m, p]`.
        gradients: `[..., m, p]`, row l the gradient of L with respect to particle l.

    Returns:
        `[..., m, p]`, a direction to *descend* along.
    """
    kappa, _ = particle_kernel(particle_distances(particles), rule)
    return kappa @ gradients


def svgd_mixing(
    distances: Tensor, rule: Bandwidth = "paper", repulsion: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The two matrices `[..., m, m]` of SVGD: its direction is `mix` @ scores + `push` @ particles.

    Args:
        distances: `[..., m, m]` squared distances between the particles.
        repulsion: 1 for SVGD; -1 turns the second term round, so that particles attract each other (the
            sign in the code that the paper's authors published), 0 drops it.
    """
    kappa, h = particle_kernel(distances, rule)
    m = distances.shape[-1]
    # ∇_{θ_j} κ(θ_j, θ_i) = 2/h · κ_ij (θ_i - θ_j), away from every neighbour; summed over j this is a
    # matrix, small beside the particles, times the particles.
    push = (torch.diag_embed(kappa.sum(-1)) - kappa) * (2 * repulsion / m / h)
    return kappa / m, push


@torch.no_grad()
def svgd_direction(
    particles: Tensor, scores: Tensor, rule: Bandwidth = "paper", repulsion: float = 1.0
) -> Tensor:
    """φ(θ_i) = 1/m Σ_j [κ(θ_j, θ_i) ∇ log p(θ_j) + ∇_{θ_j} κ(θ_j, θ_i)].

    The first term pulls the particles uphill, the second pushes them apart.

    Args:
        particles: `[..., m, p]`.
        scores: `[..., m, p]`, row j is ∇ log p(θ_j).
        repulsion: see `svgd_mixing`.

    Returns:
        `[..., m, p]`, a direction to *ascend* along.
    """
    mix, push = svgd_mixing(particle_distances(particles), rule, repulsion)
    return mix @ scores + push @ particles
