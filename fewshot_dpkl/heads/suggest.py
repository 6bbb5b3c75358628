"""Which unlabelled examples to label next: those that stand for most of what no label stands for yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

COMMON = 0.8  # of the mean of all points, taken off before they are compared
BLOCK = 1024  # the similarities of so many points to all others are in memory at a time


def suggest(X: ArrayLike, labeled: ArrayLike, count: int) -> np.ndarray:
    """Row numbers `[count]` of the examples `X` `[n, D]` to label, the most useful first.

    Every example is represented as well as its cosine to the labelled example that is most like it. One by
    one, the example is taken whose label makes the sum of these over all examples largest, beside those
    `labeled` `[m, D]` before: in the middle of many examples that are not like a labelled one.
    """
    features, known = np.asarray(X, np.float32), np.asarray(labeled, np.float32)
    if not 1 <= count <= len(features):
        raise ValueError(f"{count} of {len(features)} examples cannot be suggested; give a number from 1 on")
    both = _unit(np.concatenate([features, known]))
    both = _unit(both - COMMON * both.mean(0))
    points, known = both[: len(features)], both[len(features) :]
    represented = (points @ known.T).max(1)
    taken: list[int] = []
    for _ in range(count):
        gain = np.zeros(len(points))
        for start in range(0, len(points), BLOCK):
            rows = slice(start, start + BLOCK)
            gain += np.maximum(points[rows] @ points.T - represented[rows, None], 0).sum(0)
        gain[taken] = -1
        taken.append(int(gain.argmax()))
        represented = np.maximum(represented, points @ points[taken[-1]])
    return np.array(taken)


def _unit(points: np.ndarray) -> np.ndarray:
    return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
