"""Baseline++ as Chen et al. (2019) evaluate it: a cosine classifier fine-tuned on the support set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, one_hot, unit
from fewshot_dpkl.heads.draws import Draws
from fewshot_dpkl.heads.particle import minibatches, normalise
from fewshot_dpkl.heads.span import support_span


class CosineHead(Head):
    """Logits `scale` · g_c cos(x, v_c), with directions v_c and per-class gains g_c learnt by SGD.

    Defaults are those of the authors' fine-tuning: 100 epochs, batches of 4, learning rate 0.01, momentum
    and dampening 0.9, weight decay 1e-3, scale 2, and weights drawn as a linear layer draws them. Training
    runs in the span of the support set plus, for each class, the part of its initial weights outside that
    span (weight decay and normalisation act on it too); for SGD this is exact.
    """

    name = "cosine"

    def __init__(
        self,
        epochs: int = 100,
        batch_size: int = 4,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        dampening: float = 0.9,
        weight_decay: float = 1e-3,
        scale: float = 2.0,
        random_state: int | None = 0,
    ) -> None:
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.scale = scale
        self.random_state = random_state

    @torch.no_grad()
    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        (episodes, n, features), classes = support.shape, int(labels.max()) + 1
        draws = [Draws(seed) for seed in seeds]
        initial = torch.stack([draw.uniform(classes, features) for draw in draws]).to(support)
        initial = (2 * initial - 1) / features**0.5  # E C D
        orders = torch.stack([draw.orders(self.epochs, n) for draw in draws]).to(labels.device)

        span = support_span(unit(support))
        inside = span.from_features(initial.transpose(-1, -2))  # E r C
        rest, rest_length = normalise(initial - span.to_features(inside).transpose(-1, -2))  # E C D, E C 1
        directions = torch.cat([inside.transpose(-1, -2), rest_length], -1)  # E C r+1
        gains = directions.norm(dim=-1)  # E C
        inputs = torch.cat([span.coordinates, support.new_zeros(episodes, n, 1)], -1)  # E n r+1

        self._descend(inputs, one_hot(labels, support.dtype), directions, gains, orders)
        weights = span.to_features(directions[..., :-1].transpose(-1, -2)).transpose(-1, -2)
        weights = weights + directions[..., -1:] * rest
        return {"class_weights": gains[..., None] * unit(weights)}

    def _descend(
        self, inputs: Tensor, targets: Tensor, directions: Tensor, gains: Tensor, orders: Tensor
    ) -> None:
        """SGD on `directions` `[E, C, r]` and `gains` `[E, C]`, in place, torch's rule for the first step."""
        sgd = torch.optim.SGD(
            [directions, gains],
            lr=self.learning_rate,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
        )
        for order in orders.unbind(1):
            for x, y in minibatches(inputs, targets, order, self.batch_size):  # E b r, E b C
                v, length = normalise(directions)
                cosine = x @ v.transpose(-1, -2)  # E b C
                residual = ((self.scale * gains[:, None] * cosine).softmax(-1) - y) * (
                    self.scale / x.shape[1]
                )
                along = (residual * cosine).sum(1)  # E C
                across = residual.transpose(-1, -2) @ x - v * along[..., None]
                directions.grad, gains.grad = gains[..., None] * across / length, along
                sgd.step()

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        logits = self.scale * unit(query) @ state["class_weights"].transpose(-1, -2)
        return logits.log_softmax(-1)
