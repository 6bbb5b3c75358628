"""Past the paper: DPKL with probabilities to trust, for frozen features that are good already."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, one_hot, unit
from fewshot_dpkl.heads.span import support_span
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.layers import Points
from fewshot_dpkl.heads.training.particle import Particles, Training, predict, predict_by_particle
from fewshot_dpkl.heads.training.similarity import FreeClassWeights
from fewshot_dpkl.kernels import squared_distances
from fewshot_dpkl.particles import Bandwidth


class CalibratedDPKLHead(Head):
    """The paper's kernel and posterior, with the three choices that cap its confidence put right.

    - The embedding is the feature vector itself, scaled to length one: a random layer D → 128 throws away
      what the backbone knows, and five examples per class do not teach it again.
    - Class weights have any length. Their particles start around the class means, which are also the mean of
      their prior: log k(x, θ_c) is then that of a Gaussian around the class, short or long.
    - The lengthscale fits the features: ℓ² = `spread` + `shot_noise` / (examples per class), the variance
      inside a class and that of a mean of few examples. Both are fixed once for a backbone on its validation
      classes (`fit_lengthscale`) and kept in its card; without them ℓ comes from the support set alone,
      by leave-one-out likelihood.

    Args:
        spread, shot_noise: the two parts of ℓ²; give both or neither.
        particles: of the class weights.
        steps: of SVGD on the whole support set, in the span of the support set where n < D.
        learning_rate: of a step, divided by examples per class + `prior`, to which the gradients grow.
        prior: strength of the prior, in examples per class: the class weights are Gaussian around the class
            mean with variance ℓ² / `prior`. With few examples they stay there, with many they leave it.
        diversity: how far from the class means the particles start, in units of ℓ.
        bandwidth: rule for κ between particles, `paper` or `liu-wang`.
        random_state: seed of the initial class weights.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import CalibratedDPKLHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> CalibratedDPKLHead().fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "dpkl-calibrated"

    def __init__(
        self,
        spread: float | None = None,
        shot_noise: float | None = None,
        particles: int = 10,
        steps: int = 50,
        learning_rate: float = 1.0,
        prior: float = 5.0,
        diversity: float = 1.0,
        bandwidth: Bandwidth = "paper",
        random_state: int | None = 0,
    ) -> None:
        self.spread = spread
        self.shot_noise = shot_noise
        self.particles = particles
        self.steps = steps
        self.learning_rate = learning_rate
        self.prior = prior
        self.diversity = diversity
        self.bandwidth = bandwidth
        self.random_state = random_state

    @torch.no_grad()
    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        span = support_span(unit(support))
        scale = self._precision(span.coordinates, labels).sqrt()[:, None, None]  # E 1 1
        points = span.coordinates * scale  # E n r, in units of ℓ
        n, classes = points.shape[1], int(labels.max()) + 1
        shot = n / classes
        means = class_means(points, labels)[:, None]  # E 1 C r
        shape = (self.particles, classes, points.shape[-1])
        noise = torch.stack([Draws(seed).normal(*shape) for seed in seeds]).to(points)
        start = means + noise * (self.diversity * points.shape[-1] ** -0.5)
        trained = Training(
            Points(points), labels, start, FreeClassWeights(),
            torch.arange(n, device=labels.device).expand(len(points), self.steps, -1),
            batch_size=n, learning_rate=self.learning_rate / (shot + self.prior), prior=self.prior / 2,
            prior_mean=means, rule=self.bandwidth, check_every=self.steps, optimizer="sgd",
        ).run()  # fmt: skip
        class_weights = span.to_features(trained.theta.flatten(1, 2).transpose(-1, -2)).transpose(-1, -2)
        return {"class_weights": class_weights.unflatten(1, shape[:2]), "scale": scale}

    def _precision(self, points: Tensor, labels: Tensor) -> Tensor:
        """1/ℓ² of every episode, `[E]`."""
        if (self.spread is None) != (self.shot_noise is None):
            raise ValueError("spread and shot_noise are the two parts of ℓ²; give both or neither")
        if self.spread is None or self.shot_noise is None:
            return leave_one_out_precision(points, labels)
        shot = points.shape[1] / (int(labels.max()) + 1)
        return points.new_full((len(points),), 1 / (self.spread + self.shot_noise / shot))

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(None, state["class_weights"])
        return predict(unit(query) * state["scale"], particles, FreeClassWeights())

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(None, state["class_weights"])
        return predict_by_particle(unit(query) * state["scale"], particles, FreeClassWeights())


def class_means(points: Tensor, labels: Tensor) -> Tensor:
    """Means `[E, C, d]` of the points `[E, n, d]` of every class, labels `[E, n]`."""
    members = one_hot(labels, points.dtype)  # E n C
    return members.transpose(-1, -2) @ points / members.sum(1)[..., None]


def squared_distances_to_means(points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`[E, n, C]` of every point to every class mean, its own computed without it; and the points that count.

    A point that is alone in its class cannot be left out: `[E, n]` is False there.
    """
    members = one_hot(labels, points.dtype)
    means, counts = class_means(points, labels), members.sum(1)  # E C d, E C
    distances = squared_distances(points, means)  # E n C
    # x - mean of the others = count / (count - 1) · (x - mean)
    apart = (counts / (counts - 1).clamp_min(1)).square()[:, None]
    counted = (members * (counts > 1).to(members)[:, None]).sum(-1) > 0
    return torch.where(members > 0, distances * apart, distances), counted


PRECISIONS = 2.0 ** torch.linspace(0, 7, 29)
"""Candidates of 1/ℓ², from 1 to 128."""
TYPICAL = 24.0
"""1/ℓ² to believe in before seeing a support set."""


def leave_one_out_precision(points: Tensor, labels: Tensor, doubt: float = 0.5) -> Tensor:
    """1/ℓ² `[E]` of each support set by itself.

    The mean of log 1/ℓ² under a posterior: leave-one-out likelihood of the labels times a log-normal prior
    around TYPICAL with standard deviation `doubt`. With one example per class only the prior is left.
    """
    distances, counted = squared_distances_to_means(points, labels)
    grid = PRECISIONS.to(points)
    log_p = (-0.5 * grid[:, None, None, None] * distances).log_softmax(-1)  # G E n C
    own = log_p.gather(-1, labels.expand(len(grid), -1, -1)[..., None]).squeeze(-1)  # G E n
    likelihood = (own * counted).sum(-1)  # G E
    prior = -0.5 * ((grid.log() - math.log(TYPICAL)) / doubt).square()
    weights = (likelihood + prior[:, None]).softmax(0)
    return (weights * grid.log()[:, None]).sum(0).exp()
