"""The lengthscale of a backbone's features, fixed once on validation classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fewshot_dpkl.evaluation.episodes import EpisodeSampler
from fewshot_dpkl.evaluation.features import FeatureSet
from fewshot_dpkl.heads.base import unit
from fewshot_dpkl.heads.calibrated import class_means

LOG_PRECISIONS = np.log(2) * np.linspace(0, 9, 91)
"""Candidates of log 1/ℓ², from 1 to 512."""


def fit_lengthscale(
    features: FeatureSet, shots: Sequence[int] = (1, 2, 5, 10), *, episodes: int = 400, seed: int = 0
) -> dict[str, float]:
    """`spread` and `shot_noise` for `CalibratedDPKLHead`: ℓ² = spread + shot_noise / shot.

    They give the least negative log-likelihood of 5-way episodes with the given shots, on average, with the
    class means as class weights. `features` must be of classes that are neither trained on nor tested on.
    Shots for which a class has too few examples are left out.

    Examples:
        >>> from fewshot_dpkl import FeatureSet, fit_lengthscale
        >>> sorted(fit_lengthscale(FeatureSet.shipped(), shots=(1, 5), episodes=20))
        ['shot_noise', 'spread']
    """
    smallest = int(np.bincount(features.labels).min())
    usable = [shot for shot in shots if shot < smallest]
    if not usable:
        raise ValueError(f"a class has only {smallest} examples; give more than {min(shots)} of every class")
    curves = np.stack([_likelihood_curve(features, shot, episodes, seed) for shot in usable])  # shots G
    candidates = np.exp(-LOG_PRECISIONS)[::2]
    best = (np.inf, 0.0, 0.0)
    for spread in candidates:
        for shot_noise in (0.0, *candidates):
            at = -np.log([spread + shot_noise / shot for shot in usable])
            losses = [np.interp(x, LOG_PRECISIONS, curve) for x, curve in zip(at, curves, strict=True)]
            best = min(best, (float(np.mean(losses)), float(spread), float(shot_noise)))
    return {"spread": best[1], "shot_noise": best[2]}


def _likelihood_curve(features: FeatureSet, shot: int, episodes: int, seed: int) -> np.ndarray:
    """Mean negative log-likelihood of the queries for every candidate of 1/ℓ²: `[G]`."""
    table = unit(torch.as_tensor(np.asarray(features.features, np.float32)))
    way, queries = min(5, len(features.class_names)), min(16, int(np.bincount(features.labels).min()) - shot)
    sampler = EpisodeSampler(features, way=way, shot=shot, query=queries, seed=seed)
    grid = torch.as_tensor(np.exp(LOG_PRECISIONS), dtype=torch.float32)
    total = np.zeros(len(grid))
    for batch in sampler.batches(np.arange(episodes), 50):
        rows = batch.support.reshape(len(batch.support), -1), batch.query.reshape(len(batch.query), -1)
        support, query = (table[torch.as_tensor(chosen)] for chosen in rows)
        labels = torch.arange(way).repeat_interleave(shot).expand(len(support), -1)
        means = class_means(support, labels)  # E C D
        scores = query @ means.transpose(-1, -2) - means.square().sum(-1)[:, None] / 2  # E q C
        truth = torch.arange(way).repeat_interleave(queries).expand(len(support), -1)
        total += [float(_nll(scores * precision, truth)) for precision in grid]
    return total / episodes


def _nll(scores: Tensor, truth: Tensor) -> Tensor:
    """Sum over episodes of the mean negative log-likelihood; scores `[E, q, C]`, truth `[E, q]`."""
    return -scores.log_softmax(-1).gather(-1, truth[..., None]).mean((1, 2)).sum()
