"""Bayesian logistic regression and a Bayesian neural network by SVGD (section 3.3, appendices B.2 and C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, unit
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.layers import FreeLayers, Points, SpanPoints
from fewshot_dpkl.heads.training.particle import Particles, Training, predict_by_particle, predictive
from fewshot_dpkl.heads.training.similarity import DotProduct, ExactKernel, PairedProduct, Similarity
from fewshot_dpkl.particles import Bandwidth

Validation = tuple[Tensor, Tensor]  # points [E, v, D] and their labels [E, v]


@dataclass(eq=False, repr=False, kw_only=True)
class ParticleHead(Head):
    """What the paper's heads share: particles of class weights, moved by SVGD.

    Args:
        particles: number of class-weight particles.
        epochs, batch_size, learning_rate: of Adam.
        prior: the log prior of the class weights is -prior·|θ|².
        bandwidth: rule for κ between particles, `paper` or `liu-wang`.
        repulsion: of SVGD's particles; -1 makes them attract each other, see `particles.svgd_mixing`.
        random_state: seed of initial weights and minibatches.

    They keep the parameters with the least training error, checked every 10 epochs; `fit_episodes` can be
    given a validation set to judge by instead, and a function to call at each check.
    """

    particles: int = 10
    epochs: int = 100
    batch_size: int = 5
    learning_rate: float = 1e-3
    prior: float = 1e-3
    bandwidth: Bandwidth = "paper"
    repulsion: float = 1.0
    random_state: int | None = 0

    def _similarity(self, like: Tensor) -> Similarity:
        """How the model compares a point with class weights, on the device of `like`."""
        raise NotImplementedError

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        return predictive(self.particle_log_proba_episodes(state, query))

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(state.get("weights"), state["class_weights"])
        return predict_by_particle(unit(query), particles, self._similarity(query))

    def _training(self, kind: type[Training] = Training, **parts: Any) -> Training:
        """Training of this `kind` with the settings of this head."""
        return kind(
            batch_size=self.batch_size, learning_rate=self.learning_rate, prior=self.prior,
            rule=self.bandwidth, repulsion=self.repulsion, **parts,
        )  # fmt: skip


@dataclass(eq=False, repr=False, kw_only=True)
class BLRHead(ParticleHead):
    """Bayesian logistic regression by SVGD on unit features (equation 14).

    Args:
        cosine: class weights of unit length too: the softmax of a cosine instead of plain logits.
        span: where n < D (and not `cosine`, and nothing to judge by but the support set), train by the
            coordinates of class weights in the span of the support set (`layers.SpanPoints`): many times
            faster. What prior and repulsion would do outside of the span is left out.

    The others are those of `ParticleHead`.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import BLRHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> BLRHead(epochs=10, learning_rate=0.1).fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "blr"
    episodes_at_once = 24

    cosine: bool = False
    span: bool = True

    def _layers(self, draws: Sequence[Draws], support: Tensor) -> Tensor | None:
        """The particles of a layer to start from, `[E, D, m, d]`, if the model has one."""
        return None

    def _similarity(self, like: Tensor) -> Similarity:
        return ExactKernel(1.0) if self.cosine else DotProduct()  # log k is the cosine, up to a constant

    def fit_episodes(
        self,
        support: Tensor,
        labels: Tensor,
        seeds: Sequence[int],
        validation: Validation | None = None,
        on_check: Callable[[int], None] | None = None,
    ) -> State:
        draws = [Draws(seed) for seed in seeds]
        weights = self._layers(draws, support)
        width = support.shape[-1] if weights is None else weights.shape[-1]
        shape = (self.particles, int(labels.max()) + 1, width)
        theta = torch.stack([draw.normal(*shape) for draw in draws]).to(support)
        orders = torch.stack([draw.orders(self.epochs, support.shape[1]) for draw in draws]).to(labels.device)
        theta = theta / width**0.5
        points, (judged, judged_labels) = unit(support), scaled(validation)
        layers = Points(points, judged)
        if weights is not None:
            layers = FreeLayers(points, weights, "adam", self.learning_rate, judged)
        elif self.span and not self.cosine and judged is None and points.shape[1] < width:
            layers = SpanPoints(points, theta)
            theta = layers.start
        trained = self._training(
            layers=layers, labels=labels, theta=theta, similarity=self._similarity(support), orders=orders,
            judged_labels=judged_labels, on_check=on_check,
        ).run()  # fmt: skip
        if isinstance(layers, SpanPoints):
            return {"class_weights": layers.class_weights(trained.theta)}
        state = {"class_weights": trained.theta}
        return state if trained.weights is None else {"weights": trained.weights, **state}


@dataclass(eq=False, repr=False, kw_only=True)
class BNNHead(BLRHead):
    """A Bayesian neural network: every particle is a layer D → `latent` with class weights of its own.

    SVGD moves all weights. Prior and repulsion act on every one of them, so it trains in all D dimensions.

    Args:
        latent: d, the width of the layer.
        cosine: layer output and class weights scaled to length one, as in DBLR and DPKL; else plain logits.

    The others are those of `ParticleHead`.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import BNNHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> BNNHead(epochs=10, latent=16, learning_rate=0.1).fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "bnn"

    latent: int = 128
    cosine: bool = True
    span: bool = field(default=False, init=False)

    def _similarity(self, like: Tensor) -> Similarity:
        return PairedProduct(normalised=self.cosine)

    def _layers(self, draws: Sequence[Draws], support: Tensor) -> Tensor:
        shape = (support.shape[-1], self.particles, self.latent)
        scale = (2 / (support.shape[-1] + self.latent)) ** 0.5  # Glorot
        return torch.stack([draw.normal(*shape) for draw in draws]).to(support).mul_(scale)


def scaled(validation: Validation | None) -> Validation | tuple[None, None]:
    """Validation points of unit length and their labels, or nothing twice."""
    return (None, None) if validation is None else (unit(validation[0]), validation[1])
