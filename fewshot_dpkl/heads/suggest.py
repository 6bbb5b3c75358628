"""Which unlabelled examples to label next: those that say most about the answers the head is unsure of."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fewshot_dpkl.heads.base import Head

COMMON = 0.8  # of the mean of all points, taken off before their cosines are a covariance
NOISE = 0.3  # of a label, against a variance of 1


def suggest(head: Head, X: ArrayLike, count: int) -> np.ndarray:
    """Row numbers `[count]` of the examples `X` `[n, D]` to label, the most useful first.

    A Gaussian process with the cosine as its covariance: a label at i lowers the variance at j by
    cov(i, j)² / (var(i) + noise). One by one, the example is taken that lowers the sum of variances most, in
    which each counts by the entropy of the head's answer: uncertain, typical of others that are, and not like
    those taken before.
    """
    features = np.asarray(X, np.float64)
    if not 1 <= count <= len(features):
        raise ValueError(f"{count} of {len(features)} examples cannot be suggested; give a number from 1 on")
    p = head.predict_proba(features)
    doubt = -(p * np.log(p)).sum(1)
    points = _unit(features)
    points = _unit(points - COMMON * points.mean(0))
    variance = np.ones(len(points))
    taken: list[int] = []
    known = np.empty((len(points), 0))  # what labels taken so far explain: covariance = PPᵀ - KKᵀ
    for _ in range(count):
        gain = np.zeros(len(points))
        for start in range(0, len(points), 1024):  # the covariances of many points are not kept
            rows = slice(start, start + 1024)
            covariance = points[rows] @ points.T - known[rows] @ known.T
            gain[rows] = covariance**2 @ doubt / (variance[rows] + NOISE)
        gain[taken] = -1
        best = int(gain.argmax())
        taken.append(best)
        column = points @ points[best] - known @ known[best]
        known = np.column_stack([known, column / (variance[best] + NOISE) ** 0.5])
        variance = variance - known[:, -1] ** 2
    return np.array(taken)


def _unit(points: np.ndarray) -> np.ndarray:
    return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
