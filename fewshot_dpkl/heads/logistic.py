"""Logistic regression, the plain rival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, one_hot, unit, widest
from fewshot_dpkl.heads.span import support_span
from fewshot_dpkl.heads.unlabelled import learnt_with, with_unlabeled


@dataclass(eq=False, repr=False, kw_only=True)
class LogisticRegressionHead(Head):
    """L2-regularised multinomial logistic regression on unit features, as scikit-learn defines it.

    Minimises `C` · Σ_i -log p(y_i | x_i) + |θ|²/2 over class weights θ and free intercepts. The Hessian of
    this loss is nowhere above that of a least-squares problem (Böhning, 1992), whose Cholesky factor
    therefore serves as a fixed preconditioner; Nesterov's acceleration with restarts does the rest. All
    episodes are solved together, in float64, in the span of their support sets when that is smaller.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import LogisticRegressionHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> LogisticRegressionHead(C=1.0).fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "logreg"
    learns_from_unlabeled = True

    C: float = 10.0
    tolerance: float = 1e-5
    max_iterations: int = 2000

    @torch.no_grad()
    def fit_episodes(
        self, support: Tensor, labels: Tensor, seeds: Sequence[int], unlabeled: Tensor | None = None
    ) -> State:
        span = support_span(unit(widest(support)))
        n, r = span.coordinates.shape[1:]
        inputs = torch.cat([span.coordinates, span.coordinates.new_ones(len(support), n, 1)], -1)  # E n r+1
        targets = one_hot(labels, inputs.dtype)  # E n C
        penalty = inputs.new_full((r + 1, 1), 1 / self.C)
        penalty[-1] = 0  # the intercept is free
        curvature = inputs.transpose(-1, -2) @ inputs / 2 + torch.diag(penalty[:, 0] + 1e-9)
        factor = torch.linalg.cholesky(curvature)  # E r+1 r+1

        weights = inputs.new_zeros(len(support), r + 1, targets.shape[-1])  # E r+1 C
        ahead, momentum = weights, weights.new_ones(len(support), 1, 1)
        for _ in range(self.max_iterations):
            residual = (inputs @ ahead).softmax(-1) - targets
            gradient = inputs.transpose(-1, -2) @ residual + penalty * ahead
            if float(gradient.abs().amax()) < self.tolerance:
                break
            step = torch.cholesky_solve(gradient, factor)
            moved = ahead - step
            uphill = (gradient * (moved - weights)).sum((1, 2), keepdim=True) > 0  # per episode
            momentum = torch.where(uphill, torch.ones_like(momentum), momentum)
            next_momentum = (1 + (1 + 4 * momentum**2).sqrt()) / 2
            ahead = moved + (momentum - 1) / next_momentum * (moved - weights)
            weights, momentum = moved, next_momentum
        weights = ahead
        class_weights = span.to_features(weights[:, :-1]).transpose(-1, -2)  # E C D
        state = {"class_weights": class_weights.to(support), "intercepts": weights[:, -1].to(support)}
        return learnt_with(self, state, support, labels, unlabeled)

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        logits = unit(query) @ state["class_weights"].transpose(-1, -2) + state["intercepts"][:, None]
        return with_unlabeled(state, query, logits.log_softmax(-1)[:, :, None])[:, :, 0]
