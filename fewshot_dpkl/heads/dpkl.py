"""DPKL, the paper's head, and DBLR, its deterministic rival (section 3.3, appendices B.2 and C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import State, unit
from fewshot_dpkl.heads.bayesian import ParticleHead, Validation, scaled
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.layers import FreeLayers, Optimizer, SpanLayers
from fewshot_dpkl.heads.training.particle import train
from fewshot_dpkl.heads.training.similarity import ExactKernel, FourierKernel, Similarity
from fewshot_dpkl.kernels import random_frequencies

Kernel = Literal["rff", "exact"]
Start = Literal["uniform", "normal"]


@lru_cache(maxsize=8)
def _frequencies(latent: int, number: int, seed: int) -> Tensor:
    """The orthogonal random frequencies `[number, latent]` of a seed, at ℓ = 1; not to be written to."""
    generator = torch.Generator().manual_seed(seed)
    return random_frequencies(latent, number, orthogonal=True, generator=generator)


@dataclass(eq=False, repr=False, kw_only=True)
class DPKLHead(ParticleHead):
    """Deep probabilistic kernel learning: Bayesian logistic regression on probabilistic embeddings.

    m particles of a layer D → `latent` (ReLU, output scaled to length one) embed a point as a bag of m
    latent vectors; P particles of unit class weights are compared with the bag by E_w k(g_w(x), θ_c).
    Layers move by functional gradient descent, class weights by SVGD. The output of the layer does not
    change with the length of a feature vector, so features need no scaling.

    Args:
        kernel: `rff` for random Fourier features, `exact` for the closed form.
        frequencies: R, the number of random frequencies (orthogonal); default 10·`latent`. Drawn once from
            `frequency_seed`, they are part of the kernel and shared by all episodes.
        frequencies_per_step: how many of them a training step looks at, a different block each time, as a
            minibatch looks at some of the points; default `latent`, one orthogonal block. A small R would
            be as fast, but training then finds directions in which the few frequencies misjudge the kernel.
        lengthscale: ℓ of the squared-exponential kernel.
        embeddings: m, the particles of the layer.
        latent: d, the width of the layer.
        start: what the layers are drawn from, `uniform` or `normal`, of the same deviation (Glorot's).
        optimizer: `adam`, `sgd` or `momentum`.
        kappa_every: steps between looks at κ of the layers and of the class weights, which hardly change
            from one step to the next.
        check_every: epochs between looks at the training error.
        span: where n < D, train by the values of the layers at the support points (`layers.SpanLayers`): many
            times faster, the same result for `sgd` and `momentum`, and for `adam` but for its factored second
            moment.

    The others are those of `ParticleHead`.
    """

    name = "dpkl"
    episodes_at_once = 8  # 8 MB of layers each

    kernel: Kernel = "rff"
    frequencies: int | None = None
    frequencies_per_step: int | None = None
    lengthscale: float = 1.0
    embeddings: int = 10
    latent: int = 128
    start: Start = "uniform"
    optimizer: Optimizer = "adam"
    kappa_every: int = 25
    check_every: int = 10
    span: bool = True
    frequency_seed: int = 0

    def _similarity(self, like: Tensor) -> Similarity:
        if self.kernel == "exact":
            return ExactKernel(self.lengthscale)
        if self.kernel != "rff":
            raise ValueError(f"unknown kernel {self.kernel!r}; use 'rff' or 'exact'")
        number = self.frequencies or 10 * self.latent
        return FourierKernel(
            _frequencies(self.latent, number, self.frequency_seed).to(like) / self.lengthscale
        )

    def _similarities_of_steps(self, model: Similarity) -> list[Similarity]:
        """What the training steps look at in turn: blocks of the frequencies, or all of a closed form."""
        if not isinstance(model, FourierKernel):
            return [model]
        blocks = model.frequencies.split(self.frequencies_per_step or self.latent)
        return [FourierKernel(block) for block in blocks]

    def _draws_of_layers(self, draws: Draws) -> Draws:
        """What the layers of an episode with these draws are drawn from."""
        return draws

    def _start_layers(self, draws: Draws, layers: Tensor, deviation: float) -> None:
        """Draw the layers `[rows, m, d]` that an episode starts from, or the next rows of them."""
        if self.start == "uniform":
            draws.fill_uniform(layers, deviation)
        elif self.start == "normal":
            layers.copy_(draws.normal(*layers.shape) * deviation)
        else:
            raise ValueError(f"unknown start {self.start!r}; use 'uniform' or 'normal'")

    def _judge(self, model: Similarity) -> Similarity:
        """What the training error is measured with: the kernel that random features estimate, far cheaper."""
        return ExactKernel(self.lengthscale)

    @torch.no_grad()
    def fit_episodes(
        self,
        support: Tensor,
        labels: Tensor,
        seeds: Sequence[int],
        validation: Validation | None = None,
        on_check: Callable[[int], None] | None = None,
    ) -> State:
        (episodes, n, features), points = support.shape, unit(support)
        in_span = self.span and n < features
        if validation is not None and in_span:
            raise ValueError("a validation set is not in the span of the support set; use span=False")
        span = None
        if in_span:
            span = SpanLayers(points, self.embeddings, self.latent, self.optimizer, self.learning_rate)
        weights = support.new_empty(episodes, features, self.embeddings, self.latent)
        deviation = (2 / (features + self.latent)) ** 0.5  # Glorot
        rows = features if span is None else 200  # of the layers at a time: they stay in cache
        theta, orders = [], []
        for e, seed in enumerate(seeds):
            draws = Draws(seed)
            draws_of_layers = self._draws_of_layers(draws)
            for first in range(0, features, rows):
                some = slice(first, first + rows)
                self._start_layers(draws_of_layers, weights[e, some], deviation)
                if span is not None:
                    span.begin(e, some, weights[e, some])
            theta.append(draws.normal(self.particles, int(labels.max()) + 1, self.latent) * self.latent**-0.5)
            orders.append(draws.orders(self.epochs, n))
        judged, judged_labels = scaled(validation)
        similarity = self._similarity(support)
        trained = train(
            span or FreeLayers(points, weights, self.optimizer, self.learning_rate, judged), labels,
            torch.stack(theta).to(support), self._judge(similarity) if validation is None else similarity,
            torch.stack(orders).to(labels.device), of_steps=self._similarities_of_steps(similarity),
            batch_size=self.batch_size, learning_rate=self.learning_rate, prior=self.prior,
            rule=self.bandwidth, repulsion=self.repulsion, kappa_every=self.kappa_every,
            check_every=self.check_every, optimizer=self.optimizer, judged_labels=judged_labels,
            on_check=on_check,
        )  # fmt: skip
        assert trained.weights is not None
        if span is None:
            weights = trained.weights
        else:
            span.add_to(weights, trained.weights)
        return {"weights": weights, "class_weights": trained.theta}


@dataclass(eq=False, repr=False, kw_only=True)
class DBLRHead(DPKLHead):
    """Bayesian logistic regression on one deterministic layer: DPKL with a single particle.

    With one embedding and the exact kernel at ℓ = 1, log k(z, θ_c) is the cosine up to a constant, κ is 1
    and the functional gradient is the plain one. It takes the parameters of `DPKLHead` that are not fixed by
    this.
    """

    name = "dblr"
    episodes_at_once = 24

    kernel: Kernel = field(default="exact", init=False)
    embeddings: int = field(default=1, init=False)
    lengthscale: float = field(default=1.0, init=False)
    frequencies: int | None = field(default=None, init=False)
    frequencies_per_step: int | None = field(default=None, init=False)
    frequency_seed: int = field(default=0, init=False)
