"""Class means of unit features, and what a support set tells of the features it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import one_hot

COMMON_DIMENSIONS = 50.0
"""How many dimensions features vary in, to be believed before seeing a support set ..."""
COMMON_WEIGHT = 4.0
"""... and how many independent pairs of examples that belief is worth."""


@dataclass(frozen=True)
class ClassMeans:
    """The means of E sets of classes, of points of unit length.

    A mean of n examples is off the class's centre by V/n, V being the variance inside a class. Where classes
    have different numbers of examples, `offsets` brings all of them to the same footing, that of the mean
    1/n; where the numbers are equal it is |mean|².

    Attributes:
        means: `[E, C, D]`.
        offsets: `[E, C]`, |mean_c|² + V (mean of 1/n - 1/n_c).
        counts: `[E, C]`, examples of every class.
        variance: `[E]`, V; 0 where every class has a single example.
    """

    means: Tensor
    offsets: Tensor
    counts: Tensor
    variance: Tensor

    @property
    def inverse_shot(self) -> Tensor:
        """The mean of 1/n over classes, `[E]`."""
        return self.counts.reciprocal().mean(-1)

    def scores(self, points: Tensor) -> Tensor:
        """x·mean_c - offset_c/2 of points `[E, q, D]`, `[E, q, C]`: -|x - mean_c|²/2 but for |x|²."""
        return points @ self.means.transpose(-1, -2) - self.offsets[:, None] / 2

    def squared_distances_left_out(self, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances `[E, n, C]` of the points that the means are of, each without its part in them.

        Also `[E, n]`, the points that count: one that is alone in its class cannot be left out.
        """
        members = one_hot(labels, torch.bool)  # E n C
        distances = squared_lengths(points) - 2 * self.scores(points)
        others = (self.counts - 1).clamp_min(1)
        # x - mean of the others = n / (n - 1) · (x - mean)
        raw = distances - (self.variance[:, None] * (self.inverse_shot[:, None] - 1 / self.counts))[:, None]
        own = raw * (self.counts / others).square()[:, None]
        own = own + (self.variance[:, None] * (self.inverse_shot[:, None] - 1 / others))[:, None]
        counted = (members & (self.counts > 1)[:, None]).any(-1)
        return torch.where(members, own, distances), counted


def class_means(points: Tensor, labels: Tensor) -> ClassMeans:
    """Of the points `[E, n, D]` of every class, labels `[E, n]`."""
    members = one_hot(labels, points.dtype)  # E n C
    counts = members.sum(1)  # E C
    means = members.transpose(-1, -2) @ points / counts[..., None]
    squares = means.square().sum(-1)  # E C
    inside = (points.square().sum((1, 2)) - (counts * squares).sum(-1)).clamp_min(0)
    variance = inside / (points.shape[1] - counts.shape[1] or 1)
    inverse = counts.reciprocal()
    offsets = squares + variance[:, None] * (inverse.mean(-1, keepdim=True) - inverse)
    return ClassMeans(means, offsets, counts, variance)


def squared_lengths(points: Tensor) -> Tensor:
    """`[E, q, D]` to `[E, q, 1]`: ones, but for rows of zeros."""
    return points.square().sum(-1, keepdim=True)


@dataclass(frozen=True)
class Geometry:
    """How examples of different classes lie to each other; no number here knows the backbone.

    Attributes:
        cosine: `[E]`, mean cosine between examples of different classes: the share of a feature vector that
            all classes have in common.
        dimensions: `[E]`, (tr Σ)² / tr Σ², in how many dimensions examples of different classes vary. The
            score of a wrong class has the deviation (tr Σ²)^(1/2) by chance alone.
    """

    cosine: Tensor
    dimensions: Tensor

    @property
    def variance(self) -> Tensor:
        """tr Σ = 1 - cosine, `[E]`: half the mean squared distance between examples of different classes."""
        return (1 - self.cosine).clamp_min(1e-6)

    def of(self, episodes: Tensor) -> Geometry:
        """That of some episodes `[G]`."""
        return Geometry(self.cosine[episodes], self.dimensions[episodes])


def geometry(points: Tensor, labels: Tensor, classes: ClassMeans) -> Geometry:
    """Of support sets of unit points `[E, n, D]`.

    Take one example of every class: C vectors with Gram matrix K. Of a normal distribution, tr Σ² is
    (m² tr S² - m (tr S)²) / ((m - 1)(m + 2)) in the mean, S being their covariance, m = C - 1 (Srivastava,
    2005). Here is its mean over all such choices, multiplied out into products between class means and
    examples. Few classes make a poor estimate: it is shrunk to COMMON_DIMENSIONS.
    """
    number = classes.means.shape[1]
    between = classes.means @ classes.means.transpose(-1, -2)  # E C C
    between = between - torch.diag_embed(between.diagonal(dim1=1, dim2=2))
    sum_between, pairs = between.sum((1, 2)), number * (number - 1)
    cosine, variance = (sum_between / pairs).clamp(0, 1), (1 - sum_between / pairs).clamp_min(1e-6)
    if number < 3:
        return Geometry(cosine, torch.full_like(cosine, COMMON_DIMENSIONS))
    members = one_hot(labels, points.dtype)  # E n C
    per_class = members / classes.counts[:, None]
    squares = (points @ points.transpose(-1, -2)).square()  # E n n
    squares = per_class.transpose(-1, -2) @ squares @ per_class  # (a·b)² of two classes: E C C
    squares = squares.sum((1, 2)) - squares.diagonal(dim1=1, dim2=2).sum(-1)
    to_others = (points @ classes.means.transpose(-1, -2)) * (1 - members)  # E n C
    shared = to_others.sum(-1).square() - to_others.square().sum(-1)  # (a·b)(a·c): E n
    shared = (per_class.sum(-1) * shared).sum(-1)
    rows = between.sum(-1)  # E C
    apart = rows.sum(-1).square() - 4 * rows.square().sum(-1) + 2 * between.square().sum((1, 2))  # (a·b)(c·d)
    of_all = number + squares  # Σ K_ij²
    of_rows = number + 2 * sum_between + squares + shared  # Σ_i (Σ_j K_ij)²
    of_sum = number**2 + 2 * number * sum_between + 2 * squares + 4 * shared + apart  # (Σ K_ij)²
    m = number - 1
    scatter = of_all - 2 * of_rows / number + of_sum / number**2  # m² tr S²
    trace = ((scatter - m * variance.square()) / ((m - 1) * (m + 2))).clamp_min(0)
    seen = (m - 1) * (m + 2) / 2 / classes.inverse_shot  # independent pairs, roughly: E
    inverse = (seen * trace / variance.square() + COMMON_WEIGHT / COMMON_DIMENSIONS) / (seen + COMMON_WEIGHT)
    return Geometry(cosine, 1 / inverse)
