"""Heads without training: the nearest example and the nearest class mean, by cosine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, one_hot, unit
from fewshot_dpkl.heads.familiar import (
    believed_distances,
    expected_distance,
    known_distances,
    share_more_familiar,
)
from fewshot_dpkl.heads.means import class_means, geometry, squared_lengths
from fewshot_dpkl.heads.unlabelled import learnt_with, with_unlabeled


@dataclass(eq=False, repr=False, kw_only=True)
class NearestNeighborHead(Head):
    """Baseline++ 1-NN (Chen et al., 2019, appendix A4): the class of the most similar support example.

    Similarity is the cosine. Probabilities are a softmax over classes of `scale` times the cosine of the
    class's most similar example; the scale changes them, never the prediction.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import NearestNeighborHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> NearestNeighborHead().fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "nn"
    can_tell_unfamiliar = True

    scale: float = 10.0

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        return {"support": unit(support), "labels": labels}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        cosine = unit(query) @ state["support"].transpose(-1, -2)  # E q n
        of_class = one_hot(state["labels"], torch.bool).transpose(-1, -2)  # E C n
        nearest = cosine.new_full((*cosine.shape[:2], of_class.shape[1]), -torch.inf)  # E q C
        for c in range(of_class.shape[1]):  # one class at a time keeps memory at E q n
            nearest[..., c] = cosine.masked_fill(~of_class[:, c, None], -torch.inf).amax(-1)
        return (self.scale * nearest).log_softmax(-1)

    def unfamiliarity_episodes(self, state: State, query: Tensor) -> Tensor:
        support, labels = state["support"], state["labels"]
        cosine = support @ support.transpose(-1, -2)  # E n n
        cosine.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        of_others = cosine.masked_fill(labels[:, None] == labels[:, :, None], -torch.inf)
        classes = class_means(support, labels)
        counted = one_hot(labels, support.dtype) @ classes.counts[..., None] > 1  # E n 1
        unit_distance = expected_distance(geometry(support, labels, classes), classes.counts.new_ones(()))
        left_out, others = (
            (2 - 2 * nearest.amax(-1)).clamp_min(0).sqrt() for nearest in (cosine, of_others)
        )  # to the nearest other one, and to the nearest of another class: E n
        known = known_distances(left_out, counted[..., 0], believed_distances(unit_distance, others))
        points = unit(query)
        nearest = (points @ support.transpose(-1, -2)).amax(-1)  # E q
        distances = (1 + squared_lengths(points)[..., 0] - 2 * nearest).clamp_min(0).sqrt()
        return share_more_familiar(distances, known)


@dataclass(eq=False, repr=False, kw_only=True)
class CentroidHead(Head):
    """Nearest class mean by cosine: softmax over `scale` times the cosine to the mean of unit features.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import CentroidHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> CentroidHead().fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "centroid"
    learns_from_unlabeled = True

    scale: float = 10.0

    def fit_episodes(
        self, support: Tensor, labels: Tensor, seeds: Sequence[int], unlabeled: Tensor | None = None
    ) -> State:
        members = one_hot(labels, support.dtype)  # E n C
        state = {"centroids": unit(members.transpose(-1, -2) @ unit(support))}  # E C D
        return learnt_with(self, state, support, labels, unlabeled)

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        cosine = unit(query) @ state["centroids"].transpose(-1, -2)  # E q C
        return with_unlabeled(state, query, (self.scale * cosine).log_softmax(-1)[:, :, None])[:, :, 0]
