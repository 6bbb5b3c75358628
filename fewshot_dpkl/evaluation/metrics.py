"""Figures of merit of class probabilities, for a batch of episodes at once.

Some are averaged within an episode, so that two heads can be compared episode by episode; those that need
many answers (calibration, entropies, confusions) are kept as counts and sums, to be pooled over episodes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of the top probability, for calibration
COVERAGE = 0.8  # share of queries that is answered when the least sure are rejected

Scores = dict[str, np.ndarray]
"""Figures by name, each with the episodes first."""


def score(
    log_p: Tensor,
    log_unseen: Tensor | None = None,
    truth: Tensor | None = None,
    unfamiliarity: tuple[Tensor, Tensor] | None = None,
) -> Scores:
    """Score the answers to E episodes.

    Args:
        log_p: `[E, way, query, way]` log-probabilities; `log_p[:, c]` are of queries of class c.
        log_unseen: `[E, unseen, way]` log-probabilities of queries of a class outside the episode.
        truth: `[E, way, query]` classes of the queries, where they are others than that.
        unfamiliarity: of the queries, `[E, way·query]`, and of the unseen ones, `[E, unseen]`.

    Returns:
        `accuracy`, `nll`, `brier`, `accuracy_at_80` `[E]`; `calibration` `[E, 15, 3]`; `entropy`
        `[E, 2, 2]`; `confusion` `[E, way, way]`; with unseen queries `unseen_auroc` and `unseen_fpr95`
        `[E]`, by the top probability; with their unfamiliarity `unfamiliar_auroc` and `unfamiliar_fpr95`, and
        `refused`, the share of known queries above 0.95. What each of them is stands at the function of its
        name.
    """
    way = log_p.shape[-1]
    if truth is None:
        truth = torch.arange(way)[:, None].expand(log_p.shape[:-1])
    log_p, truth = log_p.cpu().double().flatten(1, 2), truth.cpu().flatten(1)  # E n way, E n
    p, true, answer = log_p.exp(), one_hot(truth, way), log_p.argmax(-1)
    right, top = (answer == truth).double(), p.amax(-1)  # E n
    scores = {
        "accuracy": right.mean(1),
        "nll": -log_p.gather(-1, truth[..., None]).mean((1, 2)),
        "brier": (p - true).square().sum(-1).mean(1),
        "accuracy_at_80": accuracy_of_surest(top, right),
        "calibration": calibration(top, right),
        "entropy": entropy(p, right),
        "confusion": true.mT @ one_hot(answer, way),
    }
    if log_unseen is not None:
        of_unseen = log_unseen.cpu().double().exp().amax(-1)
        scores |= {"unseen_auroc": auroc(top, of_unseen), "unseen_fpr95": fpr_at_95(top, of_unseen)}
    if unfamiliarity is not None:
        known, unseen = (-values.cpu().double() for values in unfamiliarity)
        scores |= {"unfamiliar_auroc": auroc(known, unseen), "unfamiliar_fpr95": fpr_at_95(known, unseen)}
        scores["refused"] = (known < -0.95).double().mean(1)
    return {name: values.double().numpy() for name, values in scores.items()}


def one_hot(classes: Tensor, way: int) -> Tensor:
    """`[E, n]` class numbers to `[E, n, way]`."""
    return torch.nn.functional.one_hot(classes, way).double()


def accuracy_of_surest(top: Tensor, right: Tensor, coverage: float = COVERAGE) -> Tensor:
    """Accuracy `[E]` on the share of queries whose top probability is highest.

    `top` and `right` are `[E, n]`; round(coverage · n) queries are kept. Of queries as sure as the last one
    kept, each counts in part, so that their order does not matter.
    """
    keep = max(1, round(coverage * top.shape[1]))
    last = top.topk(keep).values[:, -1:]
    above, level = (top > last).double(), (top == last).double()
    part = (keep - above.sum(1, keepdim=True)) / level.sum(1, keepdim=True)
    return (right * (above + part * level)).sum(1) / keep


def calibration(top: Tensor, right: Tensor) -> Tensor:
    """Queries, sum of `top` and right answers in each of 15 equal bins (lower, upper] of `top`: `[E, 15, 3]`.

    `top` and `right` are `[E, n]`.
    """
    bins = (top * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    sums = torch.zeros(len(top), BINS, 3, dtype=torch.float64)
    for column, values in enumerate((torch.ones_like(top), top, right)):
        sums[..., column].scatter_add_(1, bins, values)
    return sums


def entropy(p: Tensor, right: Tensor) -> Tensor:
    """Count and sum of the entropies (nats) of right, then of wrong answers: `[E, 2, 2]`.

    `p` is `[E, n, way]`, `right` `[E, n]`.
    """
    group = torch.stack((right, 1 - right), 1)  # E 2 n
    each = torch.special.entr(p).sum(-1)  # E n
    return torch.stack((group.sum(-1), (group * each[:, None]).sum(-1)), -1)


def auroc(known: Tensor, unseen: Tensor) -> Tensor:
    """Chance `[E]` that a known query `[E, n]` has a higher value than an unseen one `[E, m]`, ties half."""
    higher = (known[:, :, None] > unseen[:, None]).double()
    level = (known[:, :, None] == unseen[:, None]).double()
    return (higher + level / 2).mean((1, 2))


def fpr_at_95(known: Tensor, unseen: Tensor) -> Tensor:
    """Share `[E]` of unseen queries `[E, m]` that pass where 95 % of the known `[E, n]` do (high ones)."""
    passing = known.topk(math.ceil(0.95 * known.shape[1])).values[:, -1:]
    return (unseen >= passing).double().mean(1)


def expected_calibration_error(bins: np.ndarray) -> float:
    """Mean distance of confidence and accuracy over bins `[15, 3]` of count, confidences, right answers.

    Examples:
        >>> import numpy as np
        >>> float(expected_calibration_error(np.array([[10, 7.0, 7], [10, 9.0, 8]])))
        0.05
    """
    count, confidence, right = bins.T
    return float(np.abs(confidence - right).sum() / count.sum())


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval, 1.96 σ / √episodes, as the field reports it.

    Examples:
        >>> import numpy as np
        >>> mean, interval = mean_interval(np.array([0.5, 0.7, 0.6, 0.6]))
        >>> f"{mean:.2f} ± {interval:.2f}"
        '0.60 ± 0.07'
    """
    return float(values.mean()), float(1.96 * values.std() / len(values) ** 0.5)
