"""What is decided on the val classes: the epoch that training keeps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fewshot_dpkl.backbones.augment import normalise
from fewshot_dpkl.data import spread_per_class
from fewshot_dpkl.evaluation.episodes import EpisodeSampler
from fewshot_dpkl.evaluation.features import FeatureSet


def few_shot_accuracy(
    features: np.ndarray, labels: np.ndarray, episodes: int = 500, query: int = 15
) -> dict[str, float]:
    """5-way 5-shot accuracy in percent of 1-NN and of the class centroid, both by cosine similarity.

    `features` `[N, D]`, `labels` `[N]`. All similarities are computed once; episodes only look them up.
    """
    sampler = EpisodeSampler(FeatureSet.from_arrays(features, labels), query=query, seed=1)
    unit = F.normalize(torch.from_numpy(features), dim=1).numpy()
    similarity = unit @ unit.T  # N N
    drawn = sampler.draw(range(episodes))
    support, queries = drawn.support.reshape(episodes, -1), drawn.query.reshape(episodes, -1)
    to_support = similarity[queries[:, :, None], support[:, None, :]]  # E 5·query 25
    within = similarity[drawn.support[:, :, :, None], drawn.support[:, :, None, :]]  # E 5 5 5
    length = np.sqrt(within.sum((2, 3)))  # E 5: length of the summed unit vectors of each class
    centroid = to_support.reshape(episodes, -1, 5, 5).sum(3) / length[:, None, :]  # E 5·query 5
    truth = np.repeat(np.arange(5), query)
    return {
        "1-nn": 100 * float((to_support.argmax(2) // 5 == truth).mean()),
        "centroid": 100 * float((centroid.argmax(2) == truth).mean()),
    }


def make_validate(
    pixels: np.ndarray, labels: np.ndarray, per_class: int
) -> Callable[[nn.Module], dict[str, float]]:
    """A function that gives the accuracies of a backbone on `per_class` pictures of every val class."""
    chosen = spread_per_class(labels, per_class)
    pixels, labels = np.ascontiguousarray(pixels[chosen]), labels[chosen]

    @torch.inference_mode()
    def validate(backbone: nn.Module) -> dict[str, float]:
        device = next(backbone.parameters()).device
        parts = [
            backbone(normalise(torch.from_numpy(pixels[begin : begin + 32]).to(device))).float().cpu()
            for begin in range(0, len(pixels), 32)
        ]
        return few_shot_accuracy(torch.cat(parts).numpy(), labels)

    return validate
