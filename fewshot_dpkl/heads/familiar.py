"""How unfamiliar a point is: the share of known examples that look more familiar than it.

A distance to what has been learnt becomes a share by what held-out examples of the support set have: they are
taken for draws from a normal distribution, of which little is believed beforehand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.heads.means import ClassMeans, Geometry, squared_lengths

TYPICAL = 0.77
"""Distance of a known example to its class mean, before any was seen, in units of that between classes ..."""
DEVIATION = 0.1
"""... and its deviation. The first is worth one example, the second five."""


def expected_distance(geometry: Geometry, inverse_shot: Tensor) -> Tensor:
    """Of an example to the mean of others, `[E]`, if classes were no closer than chance."""
    return (geometry.variance * (1 + inverse_shot)).sqrt()


def believed_distances(unit_distance: Tensor, others: Tensor) -> Tensor:
    """Mean and deviation `[E, 2]` of the distance of known examples to the nearest class, before any is seen.

    It is the lesser of two normal distances: to its own class, of which there is a belief in multiples of
    `unit_distance` `[E]`, and to the nearest other class, as support points have it in `others` `[E, n]`. The
    more classes, the less the second (its first two moments: Clark, 1961).
    """
    own, variance = TYPICAL * unit_distance, (DEVIATION * unit_distance).square()
    other = others.mean(1)
    variance_of_other = (5 * variance + (others - other[:, None]).square().sum(-1)) / (5 + others.shape[1])
    spread = (variance + variance_of_other).sqrt().clamp_min(1e-12)
    z = (other - own) / spread
    nearer, density = torch.special.ndtr(z), spread * torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    mean = own * nearer + other * (1 - nearer) - density
    square = (variance + own.square()) * nearer + (variance_of_other + other.square()) * (1 - nearer)
    square = square - (own + other) * density
    return torch.stack([mean, (square - mean.square()).clamp_min(0).sqrt()], -1)


def known_distances(distances: Tensor, counted: Tensor, believed: Tensor) -> Tensor:
    """Mean and deviation `[E, 2]` of the distances that known examples have.

    Args:
        distances: `[E, n]` of held-out examples.
        counted: `[E, n]`, which of them to use; where there is none, the belief beforehand decides.
        believed: `[E, 2]`, mean and deviation before one is seen.
    """
    counted, number = counted.to(distances), counted.sum(-1)  # E
    mean = (believed[:, 0] + (distances * counted).sum(-1)) / (1 + number)
    squares = ((distances - mean[:, None]).square() * counted).sum(-1)
    variance = (5 * believed[:, 1].square() + squares) / (5 + number)
    return torch.stack([mean, (variance * (1 + 1 / (1 + number))).sqrt()], -1)


def share_more_familiar(distances: Tensor, known: Tensor) -> Tensor:
    """The share `[E, q]` of known examples, of `known_distances` `[E, 2]`, that are nearer than `[E, q]`."""
    return torch.special.ndtr((distances - known[:, None, 0]) / known[:, None, 1].clamp_min(1e-12))


def distance_to_nearest(scores: Tensor, points: Tensor) -> Tensor:
    """`[E, q]` of points `[E, q, D]` to the nearest of class means, from `ClassMeans.scores` `[E, q, C]`."""
    return (squared_lengths(points)[..., 0] - 2 * scores.amax(-1)).clamp_min(0).sqrt()


def of_class_means(points: Tensor, labels: Tensor, classes: ClassMeans, geometry: Geometry) -> Tensor:
    """`known_distances` `[E, 2]` to the nearest class mean, each support point left out of its own."""
    squared, counted = classes.squared_distances_left_out(points, labels)
    distances = squared.clamp_min(0).sqrt()  # E n C
    others = distances.masked_fill(one_hot(labels, torch.bool), torch.inf).amin(-1)
    believed = believed_distances(expected_distance(geometry, classes.inverse_shot).to(distances), others)
    return known_distances(distances.amin(-1), counted, believed)
