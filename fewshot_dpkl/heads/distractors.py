"""Distractors: how far unlabelled points are to be believed to be of a task's classes at all."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import one_hot, unit, widest
from fewshot_dpkl.heads.familiar import DEVIATION, distance_to_nearest, expected_distance, known_distances
from fewshot_dpkl.heads.means import class_means, geometry

NEAR = 0.75  # believed distance of a point of the classes to the nearest, in units of that between classes
NARROWER = 0.7  # than the distances of support points the two groups are taken to be
BELIEVED = 5.0  # points that the belief about their spread, and about the mean distance, is worth
MANY, UNSURE = 0.4, 0.05  # share of distractors from which on they count, and how gradually
THEN = 0.5  # trust in the other points, where there are many
ROUNDS = 20


def weights_of_unlabeled(support: Tensor, labels: Tensor, unlabeled: Tensor) -> Tensor:
    """What points `[E, u, D]` count beside support sets `[E, n, D]` of `labels` `[E, n]`: `[E, u]`, 0 to 1.

    Distances to the nearest class mean are a mixture of two normal distributions. A distractor is as far as
    support points are from the nearest class that is not theirs; a point of the classes as near as support
    points left out of their own class are, of which there are none at one shot: then its mean distance is
    learnt from the points. Where the share of distractors is low all points count, since at one shot
    points of the classes may look like distractors.
    """
    known, points = unit(support), unit(unlabeled)
    classes, wide = class_means(known, labels), widest(known)
    seen = geometry(wide, labels, class_means(wide, labels))
    scale = expected_distance(seen, classes.inverse_shot.to(wide)).to(known)  # E
    squared, counted = classes.squared_distances_left_out(known, labels)
    own = squared.amin(-1).clamp_min(0).sqrt()  # E n
    others = torch.where(one_hot(labels, torch.bool), torch.inf, squared).amin(-1).clamp_min(0).sqrt()
    believed = scale[:, None] * scale.new_tensor([NEAR, DEVIATION])  # E 2
    near, far = known_distances(own, counted, believed)[:, 0], others.mean(1)
    number = counted.sum(-1)
    squares = ((own - near[:, None]).square() * counted).sum(-1) + (others - far[:, None]).square().sum(-1)
    squares = squares + BELIEVED * (DEVIATION * scale).square()
    variance = squares / (number + others.shape[1] + BELIEVED) * (1 + 1 / (1 + number))
    of_classes, share = two_groups(
        distance_to_nearest(classes.scores(points), points),
        near,
        far,
        (NARROWER**2 * variance).clamp_min(1e-12),
        number + BELIEVED,
    )
    many = torch.sigmoid((share - MANY) / UNSURE)[:, None]
    return 1 - many * (1 - THEN * of_classes)


def two_groups(
    distances: Tensor, near: Tensor, far: Tensor, variance: Tensor, worth: Tensor
) -> tuple[Tensor, Tensor]:
    """The chance `[E, u]` that `distances` `[E, u]` are of the nearer group, and the other's share `[E]`.

    Rounds of expectation maximisation. The mean of the nearer group begins at `near` `[E]`, a belief that is
    `worth` so many points; that of the other, `far`, and their common `variance` are given.
    """
    mean, share = near, torch.full_like(near, 0.2)
    for _ in range(ROUNDS):
        gap = (far - mean).clamp_min(0.5 * variance.sqrt())
        apart = ((far + mean) / 2)[:, None] - distances  # E u
        nearer = torch.sigmoid((gap / variance)[:, None] * apart + ((1 - share) / share).log()[:, None])
        share = ((1 - nearer).sum(1) + 2) / (distances.shape[1] + 10)
        mean = (worth * near + (nearer * distances).sum(1)) / (worth + nearer.sum(1))
    return nearer, share
