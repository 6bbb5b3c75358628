"""Episodes: few-shot tasks drawn from a set of features by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fewshot_dpkl.evaluation.features import FeatureSet


@dataclass(frozen=True)
class Episodes:
    """A batch of tasks, as row numbers of a FeatureSet.

    Attributes:
        numbers: `[E]`, which episodes these are.
        classes: `[E, way]`, class numbers of the FeatureSet; class c of an episode is `classes[:, c]`.
        support: `[E, way, shot]` row numbers.
        query: `[E, way, query]` row numbers.
        seeds: `[E]`, a seed for the head's own randomness in each episode.
        unseen: `[E, query]` row numbers of one class that is not among the classes of the episode, or
            `[E, 0]` when none were asked for.
    """

    numbers: np.ndarray
    classes: np.ndarray
    support: np.ndarray
    query: np.ndarray
    seeds: np.ndarray
    unseen: np.ndarray


class EpisodeSampler:
    """Draws `way`-way `shot`-shot tasks with `query` queries per class.

    Episode number i depends on the seed and on i alone: the same for every head, machine, batch size and
    number of episodes. It uses nothing of the random generator but its uniform numbers, whose stream
    NumPy keeps stable.

    Examples:
        >>> from fewshot_dpkl import EpisodeSampler, FeatureSet
        >>> sampler = EpisodeSampler(FeatureSet.shipped(), way=5, shot=1, query=16, seed=0)
        >>> drawn = sampler.draw(range(3))
        >>> drawn.support.shape, drawn.query.shape
        ((3, 5, 1), (3, 5, 16))
    """

    def __init__(
        self, features: FeatureSet, *, way: int = 5, shot: int = 5, query: int = 16, seed: int = 0
    ) -> None:
        for name, value, least in (
            ("way", way, 2),
            ("shot", shot, 1),
            ("query", query, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.way, self.shot, self.query, self.seed = way, shot, query, seed
        self.rows = [np.flatnonzero(features.labels == c) for c in range(len(features.class_names))]
        if len(self.rows) < way:
            raise ValueError(
                f"a {way}-way task needs {way} classes, but the features hold {len(self.rows)}; lower way"
            )
        for name, rows in zip(features.class_names, self.rows, strict=True):
            if len(rows) < shot + query:
                raise ValueError(
                    f"class {name!r} has {len(rows)} examples, but an episode takes {shot + query} of each "
                    f"class ({shot} shots + {query} queries); lower shot or query, or add examples"
                )

    def draw(self, numbers: range | np.ndarray, *, unseen: bool = False) -> Episodes:
        """The episodes with the given numbers; `unseen` adds queries of a class that is not in them."""
        classes = np.empty((len(numbers), self.way), np.int64)
        rows = np.empty((len(numbers), self.way, self.shot + self.query), np.int64)
        seeds = np.empty(len(numbers), np.int64)
        for i, number in enumerate(numbers):
            uniform = np.random.Generator(np.random.PCG64([self.seed, int(number)])).random
            seeds[i] = int(uniform() * 2**53)
            classes[i] = np.argsort(uniform(len(self.rows)), kind="stable")[: self.way]
            for c, label in enumerate(classes[i]):
                order = np.argsort(uniform(len(self.rows[label])), kind="stable")
                rows[i, c] = self.rows[label][order[: self.shot + self.query]]
        support, query = np.split(rows, [self.shot], axis=2)
        outside = self._draw_unseen(numbers, classes) if unseen else np.empty((len(numbers), 0), np.int64)
        return Episodes(np.asarray(numbers), classes, support, query, seeds, outside)

    def _draw_unseen(self, numbers: range | np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Rows `[E, query]` of a class outside `classes` `[E, way]`, from a stream of its own per episode."""
        if self.way == len(self.rows):
            raise ValueError(
                f"a {self.way}-way task leaves no class unseen, of {len(self.rows)} in the features; "
                "lower way or do without unseen queries"
            )
        rows = np.empty((len(numbers), self.query), np.int64)
        for i, number in enumerate(numbers):
            uniform = np.random.Generator(np.random.PCG64([self.seed, int(number), 1])).random
            outside = np.setdiff1d(np.arange(len(self.rows)), classes[i])
            label = outside[int(uniform() * len(outside))]
            order = np.argsort(uniform(len(self.rows[label])), kind="stable")
            rows[i] = self.rows[label][order[: self.query]]
        return rows

    def batches(self, numbers: range | np.ndarray, size: int, *, unseen: bool = False) -> Iterator[Episodes]:
        """The same episodes, `size` at a time."""
        for start in range(0, len(numbers), size):
            yield self.draw(numbers[start : start + size], unseen=unseen)
