"""The paper's classifiers: BLR, DBLR and DPKL (section 3.3, appendix C.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, unit
from fewshot_dpkl.heads.draws import Draws
from fewshot_dpkl.heads.particle import (
    DotProduct,
    ExactKernel,
    FourierKernel,
    Optimizer,
    Particles,
    Similarity,
    predict,
    train,
)
from fewshot_dpkl.heads.span import Span, support_span
from fewshot_dpkl.kernels import random_frequencies
from fewshot_dpkl.particles import Bandwidth, particle_distances


class BLRHead(Head):
    """Bayesian logistic regression by SVGD on unit features (equation 14).

    Args:
        particles: number of class-weight particles.
        epochs, batch_size, learning_rate: of Adam.
        prior: the log prior of the class weights is -prior·|θ|².
        bandwidth: rule for κ between particles, `paper` or `liu-wang`.
        random_state: seed of initial weights and minibatches.
    """

    name = "blr"

    def __init__(
        self,
        particles: int = 10,
        epochs: int = 100,
        batch_size: int = 5,
        learning_rate: float = 1e-3,
        prior: float = 1e-3,
        bandwidth: Bandwidth = "paper",
        random_state: int | None = 0,
    ) -> None:
        self.particles = particles
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.prior = prior
        self.bandwidth = bandwidth
        self.random_state = random_state

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        draws = [Draws(seed) for seed in seeds]
        shape = (self.particles, int(labels.max()) + 1, support.shape[-1])
        theta = torch.stack([draw.normal(*shape) for draw in draws]).to(support)
        orders = torch.stack([draw.orders(self.epochs, support.shape[1]) for draw in draws]).to(labels.device)
        theta = theta / support.shape[-1] ** 0.5
        trained = train(
            unit(support), labels, Particles(None, theta), DotProduct(), orders, batch_size=self.batch_size,
            learning_rate=self.learning_rate, prior=self.prior, rule=self.bandwidth,
        )  # fmt: skip
        return {"class_weights": trained.theta}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        return predict(unit(query), Particles(None, state["class_weights"]), DotProduct())


class DPKLHead(Head):
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
        optimizer: `adam`, `sgd` or `momentum`.
        span: train in the span of the support set where n < D (see `span.py`): many times faster, the same
            result for `sgd` and `momentum`, another basis for `adam`.
        particles, epochs, batch_size, learning_rate, prior, bandwidth, random_state: as in `BLRHead`.
    """

    name = "dpkl"

    def __init__(
        self,
        kernel: Literal["rff", "exact"] = "rff",
        frequencies: int | None = None,
        frequencies_per_step: int | None = None,
        lengthscale: float = 1.0,
        embeddings: int = 10,
        latent: int = 128,
        particles: int = 10,
        epochs: int = 100,
        batch_size: int = 5,
        learning_rate: float = 1e-3,
        prior: float = 1e-3,
        bandwidth: Bandwidth = "paper",
        optimizer: Optimizer = "adam",
        span: bool = True,
        frequency_seed: int = 0,
        random_state: int | None = 0,
    ) -> None:
        self.kernel = kernel
        self.frequencies = frequencies
        self.frequencies_per_step = frequencies_per_step
        self.lengthscale = lengthscale
        self.embeddings = embeddings
        self.latent = latent
        self.particles = particles
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.prior = prior
        self.bandwidth = bandwidth
        self.optimizer = optimizer
        self.span = span
        self.frequency_seed = frequency_seed
        self.random_state = random_state

    def _similarity(self, like: Tensor) -> tuple[Similarity, Sequence[Similarity]]:
        """The kernel of the model and those of the training steps, on the device of `like`."""
        if self.kernel == "exact":
            exact = ExactKernel(self.lengthscale)
            return exact, [exact]
        if self.kernel != "rff":
            raise ValueError(f"unknown kernel {self.kernel!r}; use 'rff' or 'exact'")
        frequencies = random_frequencies(
            self.latent,
            self.frequencies or 10 * self.latent,
            orthogonal=True,
            lengthscale=self.lengthscale,
            generator=torch.Generator().manual_seed(self.frequency_seed),
        ).to(like)
        blocks = frequencies.split(self.frequencies_per_step or self.latent)
        return FourierKernel(frequencies), [FourierKernel(block) for block in blocks]

    @torch.no_grad()
    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        episodes, n, features = support.shape
        span = support_span(unit(support)) if self.span else Span(unit(support), None)
        # Full weights are large: each episode's are drawn and projected while they are in cache.
        weights = support.new_empty(episodes, self.embeddings, features, self.latent)
        inside, outside, theta, orders = [], [], [], []
        for e, seed in enumerate(seeds):
            draws = Draws(seed)
            weights[e] = draws.normal(*weights.shape[1:]) * (2 / (features + self.latent)) ** 0.5  # Glorot
            theta.append(draws.normal(self.particles, int(labels.max()) + 1, self.latent) * self.latent**-0.5)
            orders.append(draws.orders(self.epochs, n))
            inside.append(span.from_features(weights[e], e))  # m r d
            outside.append(
                particle_distances(weights[e].flatten(1)) - particle_distances(inside[e].flatten(1))
            )
        start = Particles(torch.stack(inside), torch.stack(theta).to(support))
        similarity, of_steps = self._similarity(support)
        trained = train(
            span.coordinates, labels, start, similarity, torch.stack(orders).to(labels.device),
            of_steps=of_steps, batch_size=self.batch_size, learning_rate=self.learning_rate, prior=self.prior,
            rule=self.bandwidth, outside=torch.stack(outside), optimizer=self.optimizer,
        )  # fmt: skip
        assert trained.weights is not None
        for e, moved in enumerate(trained.weights):
            weights[e] += span.to_features(moved - inside[e], e)
        return {"weights": weights, "class_weights": trained.theta}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(state["weights"], state["class_weights"])
        return predict(unit(query), particles, self._similarity(query)[0])


class DBLRHead(DPKLHead):
    """Bayesian logistic regression on one deterministic layer: DPKL with a single particle.

    With one embedding and the exact kernel at ℓ = 1, log k(z, θ_c) is the cosine up to a constant, κ is 1
    and the functional gradient is the plain one.
    """

    name = "dblr"

    def __init__(
        self,
        latent: int = 128,
        particles: int = 10,
        epochs: int = 100,
        batch_size: int = 5,
        learning_rate: float = 1e-3,
        prior: float = 1e-3,
        bandwidth: Bandwidth = "paper",
        random_state: int | None = 0,
    ) -> None:
        super().__init__(
            kernel="exact",
            embeddings=1,
            latent=latent,
            particles=particles,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            prior=prior,
            bandwidth=bandwidth,
            random_state=random_state,
        )
