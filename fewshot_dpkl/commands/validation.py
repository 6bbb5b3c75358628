"""What is decided on the val classes: the epoch that training keeps, and the lengthscale of the features."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fewshot_dpkl.backbones import Extractor, extract_features
from fewshot_dpkl.backbones.augment import normalise
from fewshot_dpkl.backbones.files import load_tensors, save_tensors
from fewshot_dpkl.data import Split, load_pixels, spread_per_class
from fewshot_dpkl.evaluation.calibration import fit_lengthscale
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


def lengthscale_of(backbone: Extractor, split: Split, device: torch.device) -> dict[str, float]:
    """`spread` and `shot_noise` of the features of a split, to four digits."""
    features = extract_features(backbone, load_pixels(split, backbone.resize), device=device)
    found = fit_lengthscale(FeatureSet(features, split.labels, split.class_names))
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def write_lengthscale(path: str | os.PathLike[str], found: dict[str, float]) -> None:
    """Into the card of the backbone in `path`."""
    tensors, card = load_tensors(path)
    save_tensors(path, tensors, {**card, "lengthscale": found})
