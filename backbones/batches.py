"""The pictures of an epoch, in an order and with an augmentation that follow from the seed alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .augment import augment
from .recipe import Recipe

_TOGETHER = 4  # pictures of a class side by side in a batch, where prototypes count


def _generator(*parts: int) -> torch.Generator:
    """A generator that depends on all of `parts` and on nothing else."""
    seed = np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed >> 1))


def shuffled(labels: np.ndarray, together: int, generator: torch.Generator) -> np.ndarray:
    """All pictures in random order `[N]`, `together` random ones of a class side by side (the last fewer)."""
    order = torch.randperm(len(labels), generator=generator).numpy()
    if together == 1:
        return order
    order = order[np.argsort(labels[order], kind="stable")]  # class by class, at random inside
    inside = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])  # a picture's place there
    _, group = np.unique(labels[order] * len(order) + inside // together, return_inverse=True)
    place = torch.rand(int(group.max()) + 1, generator=generator).numpy()
    return order[np.argsort(place[group], kind="stable")]


def batches(
    images: np.ndarray, labels: np.ndarray, recipe: Recipe, epoch: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Augmented pictures `[B, 3, S, S]` and labels `[B]` of one epoch, this process's share of each batch."""
    stage = recipe.stage_of(epoch)
    order = shuffled(labels, _TOGETHER if recipe.prototypes else 1, _generator(recipe.seed, epoch))
    share = stage.batch_size // world
    for step in range(len(labels) // stage.batch_size):
        begin = step * stage.batch_size + rank * share
        chosen = np.sort(order[begin : begin + share])  # sorted: kind to a memory-mapped file
        generator = _generator(recipe.seed, epoch, step, rank)
        pictures = torch.from_numpy(images[chosen])
        yield (
            augment(pictures, stage.size, recipe.area, recipe.jitter, generator),
            torch.from_numpy(labels[chosen]),
        )
