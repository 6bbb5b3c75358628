"""Episodes: few-shot tasks drawn from a set of features by a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv

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
        query_classes: `[E, way, query]`, of which of the `way` classes a query is: 0, 1, ... by row, unless
            classes have uneven numbers of queries.
        unlabeled: `[E, u]` row numbers of examples whose class no head is told, or `[E, 0]`.
    """

    numbers: np.ndarray
    classes: np.ndarray
    support: np.ndarray
    query: np.ndarray
    seeds: np.ndarray
    unseen: np.ndarray
    query_classes: np.ndarray
    unlabeled: np.ndarray


class EpisodeSampler:
    """Draws `way`-way `shot`-shot tasks with `query` queries per class.

    Episode number i depends on the seed and on i alone: the same for every head, machine, batch size and
    number of episodes. It uses nothing of the random generator but its uniform numbers, whose stream
    NumPy keeps stable. What the last four arguments add leaves classes and support sets as they are.

    Args:
        concentration: of a Dirichlet distribution, of which each episode draws the proportions of its `way` ·
            `query` queries (2 in Veilleux et al., 2021); None: as many of every class.
        transductive: an episode's queries are unlabelled examples of it.
        unlabeled: how many further examples of every class are, too; none of them in support set or queries.
        distractors: from how many classes outside the episode as many unlabelled examples come.

    Examples:
        >>> from fewshot_dpkl import EpisodeSampler, FeatureSet
        >>> sampler = EpisodeSampler(FeatureSet.shipped(), way=5, shot=1, query=16, seed=0)
        >>> drawn = sampler.draw(range(3))
        >>> drawn.support.shape, drawn.query.shape
        ((3, 5, 1), (3, 5, 16))
    """

    def __init__(
        self,
        features: FeatureSet,
        *,
        way: int = 5,
        shot: int = 5,
        query: int = 16,
        seed: int = 0,
        concentration: float | None = None,
        transductive: bool = False,
        unlabeled: int = 0,
        distractors: int = 0,
    ) -> None:
        least = {"way": (way, 2), "shot": (shot, 1), "query": (query, 1), "seed": (seed, 0)}
        least |= {"unlabeled": (unlabeled, 0), "distractors": (distractors, 0)}
        for name, (value, lowest) in least.items():
            if value < lowest:
                raise ValueError(f"{name} is {value}; it must be at least {lowest}")
        if concentration is not None and not 0 < concentration < np.inf:
            raise ValueError(f"the concentration of the proportions is {concentration}; it must be positive")
        if distractors and not unlabeled:
            raise ValueError("distractors are unlabelled examples; say by unlabeled how many of each class")
        self.way, self.shot, self.query, self.seed = way, shot, query, seed
        self.concentration, self.transductive = concentration, transductive
        self.unlabeled, self.distractors = unlabeled, distractors
        self.rows = [np.flatnonzero(features.labels == c) for c in range(len(features.class_names))]
        self._check(features.class_names)

    def _check(self, class_names: Sequence[str]) -> None:
        """Refuse tasks for which there are too few classes or examples."""
        way, wanted, known = self.way, self.way + self.distractors, len(self.rows)
        if known < wanted:
            more = f" with {self.distractors} classes of distractors" if self.distractors else ""
            raise ValueError(
                f"a {way}-way task{more} needs {wanted} classes, but the features hold {known}; lower way"
                + (" or distractors" if more else "")
            )
        number = self.shot + self.query + self.unlabeled
        parts = f"{self.shot} shots + {self.query} queries"
        parts += f" + {self.unlabeled} unlabelled" if self.unlabeled else ""
        for name, rows in zip(class_names, self.rows, strict=True):
            if len(rows) < number:
                raise ValueError(
                    f"class {name!r} has {len(rows)} examples, but an episode takes {number} of each "
                    f"class ({parts}); lower shot or query{' or unlabeled' * bool(self.unlabeled)}, "
                    "or add examples"
                )

    def draw(self, numbers: range | np.ndarray, *, unseen: bool = False) -> Episodes:
        """The episodes with the given numbers; `unseen` adds queries of a class that is not in them."""
        classes = np.empty((len(numbers), self.way), np.int64)
        support = np.empty((len(numbers), self.way, self.shot), np.int64)
        query, query_classes = np.empty((2, len(numbers), self.way, self.query), np.int64)
        unlabeled = np.empty((len(numbers), self.way, self.unlabeled), np.int64)
        seeds = np.empty(len(numbers), np.int64)
        for i, number in enumerate(numbers):
            uniform = np.random.Generator(np.random.PCG64([self.seed, int(number)])).random
            seeds[i] = int(uniform() * 2**53)
            classes[i] = np.argsort(uniform(len(self.rows)), kind="stable")[: self.way]
            counts = self._query_counts(number, classes[i])
            asked = []
            for c, label in enumerate(classes[i]):
                order = np.argsort(uniform(len(self.rows[label])), kind="stable")
                rows = self.rows[label][order]
                asked_until = self.shot + counts[c]
                support[i, c] = rows[: self.shot]
                asked.append(rows[self.shot : asked_until])
                unlabeled[i, c] = rows[asked_until : asked_until + self.unlabeled]
            query[i] = np.concatenate(asked).reshape(self.way, -1)
            query_classes[i] = np.repeat(np.arange(self.way), counts).reshape(self.way, -1)
        outside = self._draw_unseen(numbers, classes) if unseen else np.empty((len(numbers), 0), np.int64)
        seen = [query.reshape(len(numbers), -1)] * self.transductive
        seen += [unlabeled.reshape(len(numbers), -1), self._draw_distractors(numbers, classes)]
        return Episodes(
            np.asarray(numbers),
            classes,
            support,
            query,
            seeds,
            outside,
            query_classes,
            np.concatenate(seen, 1),
        )

    def _query_counts(self, number: int, classes: np.ndarray) -> np.ndarray:
        """How many queries each of the `classes` `[way]` of an episode has: `[way]`.

        Uneven ones are drawn one by one, by proportions from a stream of their own; a class of which no
        example is left is not drawn again.
        """
        if self.concentration is None:
            return np.full(self.way, self.query)
        uniform = np.random.Generator(np.random.PCG64([self.seed, int(number), 2])).random
        shares = gammaincinv(self.concentration, uniform(self.way))  # gamma variates: a Dirichlet's, unscaled
        left = np.array([len(self.rows[c]) for c in classes]) - self.shot - self.unlabeled
        counts = np.zeros(self.way, np.int64)
        for u in uniform(self.way * self.query):
            bounds = np.cumsum(np.where(counts < left, shares, 0))
            counts[min(np.searchsorted(bounds, u * bounds[-1], side="right"), self.way - 1)] += 1
        return counts

    def _draw_distractors(self, numbers: range | np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Rows `[E, distractors · unlabeled]` of classes outside `classes` `[E, way]`."""
        rows = np.empty((len(numbers), self.distractors, self.unlabeled), np.int64)
        for i, number in enumerate(numbers if self.distractors else ()):
            uniform = np.random.Generator(np.random.PCG64([self.seed, int(number), 3])).random
            outside = np.setdiff1d(np.arange(len(self.rows)), classes[i])
            chosen = outside[np.argsort(uniform(len(outside)), kind="stable")[: self.distractors]]
            for k, label in enumerate(chosen):
                order = np.argsort(uniform(len(self.rows[label])), kind="stable")
                rows[i, k] = self.rows[label][order[: self.unlabeled]]
        return rows.reshape(len(numbers), -1)

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
