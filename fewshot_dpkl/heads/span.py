"""The support-span identity: train in n dimensions instead of D.

The gradient of any loss of XW with respect to W is XᵀA: it lies in the span of the n support points.
With n < D only the part of W inside that span ever moves. In an orthonormal basis Q of the span,
X = S Q with S `[n, n]`, XW = S (QW), and the rest of W stays what it was at the start. For optimisers
that treat rotated coordinates alike (SGD, with or without momentum) this is exact. (The layers of DBLR and
DPKL go further, `SpanLayers` in `layers.py`.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import widest


@dataclass(frozen=True)
class Span:
    """Support points in coordinates of their own span.

    Attributes:
        coordinates: `[E, n, r]`, S.
        basis: `[E, r, D]`, Q, or None where the coordinates are the features themselves.
    """

    coordinates: Tensor
    basis: Tensor | None

    def from_features(self, weights: Tensor) -> Tensor:
        """QW, the part of `weights` `[E, D, k]` inside the span: `[E, r, k]`."""
        return weights if self.basis is None else self.basis @ weights

    def to_features(self, weights: Tensor) -> Tensor:
        """QᵀW: `[E, r, k]` back to `[E, D, k]`."""
        return weights if self.basis is None else self.basis.transpose(-1, -2) @ weights


def support_span(support: Tensor) -> Span:
    """Coordinates of the support points `[E, n, D]` in their span, if n < D; else the points as they are.

    Of all orthonormal bases this is the symmetric one, S = (XXᵀ)^(1/2): it does not depend on the order
    of the points, and coordinate i is the direction closest to point i. Directions that the points do
    not span (duplicates) have zero coordinates and zero basis rows.
    """
    n, d = support.shape[1:]
    if n >= d:
        return Span(support, None)
    points = widest(support)
    root, inverse_root = roots(points @ points.transpose(-1, -2))  # E n n
    return Span(root.to(support), (inverse_root @ points).to(support))


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """M^(1/2) and M^(-1/2) of positive matrices `[E, n, n]`; directions that M does not have are left out."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > values[:, -1:] * 1e-9
    root = torch.where(kept, values, 0).sqrt()
    inverse = torch.where(kept, root, torch.inf).reciprocal()
    back = vectors.transpose(-1, -2)
    return (vectors * root[:, None]) @ back, (vectors * inverse[:, None]) @ back
