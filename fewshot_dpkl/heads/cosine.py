"""Baseline++ as Chen et al. (2019) evaluate it: a cosine classifier fine-tuned on the support set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, one_hot, unit
from fewshot_dpkl.heads.span import support_span
from fewshot_dpkl.heads.training import native
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.layers import take
from fewshot_dpkl.heads.training.particle import normalise


@dataclass(eq=False, repr=False, kw_only=True)
class CosineHead(Head):
    """Logits `scale` · g_c cos(x, v_c), with directions v_c and per-class gains g_c learnt by SGD.

    Defaults are those of the authors' fine-tuning: 100 epochs, batches of 4, learning rate 0.01, momentum
    and dampening 0.9, weight decay 1e-3, scale 2, and weights drawn as a linear layer draws them. Training
    runs in the span of the support set plus, for each class, the part of its initial weights outside that
    span (weight decay and normalisation act on it too); for SGD this is exact.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import CosineHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> CosineHead().fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "cosine"

    epochs: int = 100
    batch_size: int = 4
    learning_rate: float = 0.01
    momentum: float = 0.9
    dampening: float = 0.9
    weight_decay: float = 1e-3
    scale: float = 2.0
    random_state: int | None = 0

    @torch.no_grad()
    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        (episodes, n, features), classes = support.shape, int(labels.max()) + 1
        draws = [Draws(seed) for seed in seeds]
        initial = torch.stack([draw.uniform(classes, features) for draw in draws]).to(support)
        initial = (2 * initial - 1) / features**0.5  # E C D
        orders = torch.stack([draw.orders(self.epochs, n) for draw in draws]).to(labels.device)

        span = support_span(unit(support))
        inside = span.from_features(initial.transpose(-1, -2))  # E r C
        rest, inverse_length = normalise(initial - span.to_features(inside).transpose(-1, -2))  # E C D, E C 1
        directions = torch.cat([inside.transpose(-1, -2), inverse_length.reciprocal()], -1)  # E C r+1
        gains = directions.norm(dim=-1, keepdim=True)  # E C 1
        inputs = torch.cat([span.coordinates, support.new_zeros(episodes, n, 1)], -1)  # E n r+1

        self._descend(inputs, labels, directions, gains, orders)
        weights = span.to_features(directions[..., :-1].transpose(-1, -2)).transpose(-1, -2)
        weights = weights + directions[..., -1:] * rest
        return {"class_weights": gains * unit(weights)}

    def _descend(
        self, inputs: Tensor, labels: Tensor, directions: Tensor, gains: Tensor, orders: Tensor
    ) -> None:
        """SGD on `directions` `[E, C, r]` and `gains` `[E, C, 1]`, in place; in C where it is there."""
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1")
        if native.knows(inputs, directions, gains):
            native.descend_cosines(
                inputs, labels, directions, gains, orders, batch=self.batch_size,
                learning_rate=self.learning_rate, momentum=self.momentum, dampening=self.dampening,
                weight_decay=self.weight_decay, scale=self.scale,
            )  # fmt: skip
            return
        targets = one_hot(labels, inputs.dtype)
        move_directions, move_gains = self._sgd(directions), self._sgd(gains)
        for order in orders.unbind(1):
            batches = zip(*(take(t, order).split(self.batch_size, 1) for t in (inputs, targets)), strict=True)
            for x, y in batches:  # E b r, E b C
                v, inverse = normalise(directions)
                cosine = torch.bmm(x, v.transpose(-1, -2))  # E b C
                logits = cosine * (self.scale * gains).transpose(-1, -2)
                p = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
                p.div_(p.sum(-1, keepdim=True))  # by hand: softmax is slow along few classes
                residual = p.sub_(y).mul_(self.scale / x.shape[1])
                along = (residual * cosine).sum(1)[..., None]  # E C 1
                across = torch.baddbmm(v * along, residual.transpose(-1, -2), x, beta=-1)
                move_directions(across.mul_(gains * inverse))
                move_gains(along)

    def _sgd(self, tensor: Tensor) -> Callable[[Tensor], None]:
        """A function that moves `tensor` by torch's rule, given its gradient; overwrites the gradient.

        (torch.optim would first take two seconds to import its compiler, in every process.)
        """
        velocity = torch.zeros_like(tensor)
        share = 1.0  # the first step has no dampening

        def move(gradient: Tensor) -> None:
            nonlocal share
            gradient.add_(tensor, alpha=self.weight_decay)
            velocity.mul_(self.momentum).add_(gradient, alpha=share)
            share = 1 - self.dampening
            tensor.sub_(velocity, alpha=self.learning_rate)

        return move

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        logits = unit(query) @ (self.scale * state["class_weights"]).transpose(-1, -2)
        return logits.log_softmax(-1)
