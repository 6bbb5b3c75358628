"""Folds of a support set: what a head says of examples that it has not seen, and weights learnt from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.heads.training.draws import Draws

Fold = tuple[Tensor, Tensor, Tensor]
"""Of G folds: their episodes `[G]`, the rows `[G, n - h]` to learn from and the rows `[G, h]` held out."""


def draw_folds(labels: Tensor, seeds: Sequence[int], number: int) -> Tensor:
    """In which fold 0, 1, ... every point is held out, `[E, n]`; -1: in none.

    The examples of a class are dealt to the folds in an order drawn from the episode's seed. An example that
    is alone in its class is never held out, so that every fold knows every class. There are at most as many
    folds as examples of the largest class; with one example of every class there are none.
    """
    order = torch.stack([Draws(seed).uniform(labels.shape[1]) for seed in seeds]).argsort(-1).to(labels)
    members = one_hot(labels.gather(-1, order), torch.long)  # E n C, in the order drawn
    dealt = ((members.cumsum(1) - 1) * members).sum(-1) % number
    alone = (members.sum(1, keepdim=True) * members).sum(-1) < 2
    return torch.empty_like(labels).scatter_(-1, order, torch.where(alone, -1, dealt))


def each_fold(folds: Tensor, at_once: int) -> Iterator[Fold]:
    """All folds of `draw_folds`, those of one size together, at most `at_once` of them."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for episode, row in enumerate(folds.tolist()):
        for fold in sorted(set(row) - {-1}):
            by_size.setdefault(row.count(fold), []).append((episode, fold))
    for group in by_size.values():
        for first in range(0, len(group), at_once):
            some = torch.tensor(group[first : first + at_once], device=folds.device)
            held = folds[some[:, 0]] == some[:, 1:]  # G n
            kept = (~held).nonzero()[:, 1].view(len(some), -1)
            yield some[:, 0], kept, held.nonzero()[:, 1].view(len(some), -1)


def weigh(scores: Tensor, labels: Tensor, held: Tensor, centre: Tensor, deviation: float) -> Tensor:
    """Weights `[E, 2]` of two sets of scores, from what they say of held-out examples.

    The weights w maximise Σ log softmax(w_1 s_1 + w_2 s_2) of the right classes plus a normal log prior on
    log w around `centre`, with this `deviation`. Found by Newton's method with Levenberg's damping; where
    nothing is held out, exp(centre).

    Args:
        scores: `[E, 2, n, C]`.
        labels, held: `[E, n]`; only points that were held out count.
        centre: `[E, 2]`, logarithms.
    """
    truth = one_hot(labels, scores.dtype)[:, None]  # E 1 n C
    counted = held[:, None, :, None].to(scores)
    precision = deviation**-2

    def loss(log_weights: Tensor) -> Tensor:
        log_p = (log_weights.exp()[..., None, None] * scores).sum(1, keepdim=True).log_softmax(-1)
        far = (log_weights - centre).square().sum(-1) * precision / 2
        return far - (log_p * truth * counted).sum((1, 2, 3))

    identity = torch.eye(2, dtype=scores.dtype, device=scores.device)
    best, lowest = centre, loss(centre)
    damping = torch.full_like(lowest, 0.1)
    for _ in range(25):
        parts = best.exp()[..., None, None] * scores  # ∂logits / ∂ log w: E 2 n C
        p = parts.sum(1, keepdim=True).softmax(-1)  # E 1 n C
        gradient = ((p - truth) * counted * parts).sum((2, 3)) + (best - centre) * precision
        spread = parts - (p * parts).sum(-1, keepdim=True)
        curvature = torch.einsum("eknc,elnc->ekl", spread * p * counted, spread) + precision * identity
        damped = curvature + torch.diag_embed(damping[:, None] * curvature.diagonal(dim1=1, dim2=2))
        tried = best - torch.linalg.solve(damped, gradient).clamp(-1, 1)
        value = loss(tried)
        better = value < lowest
        best, lowest = torch.where(better[:, None], tried, best), torch.where(better, value, lowest)
        damping = torch.where(better, damping * 0.3, damping * 4).clamp(1e-4, 1e3)
    return best.exp()
