"""The paper's classifiers: BLR, BNN, DBLR and DPKL (section 3.3, appendices B.2 and C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, unit
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.layers import FreeLayers, Optimizer, Points, SpanLayers
from fewshot_dpkl.heads.training.particle import Particles, predict, predict_by_particle, train
from fewshot_dpkl.heads.training.similarity import (
    DotProduct,
    ExactKernel,
    FourierKernel,
    PairedProduct,
    Similarity,
)
from fewshot_dpkl.kernels import random_frequencies
from fewshot_dpkl.particles import Bandwidth

Start = Literal["uniform", "normal"]
Validation = tuple[Tensor, Tensor]  # points [E, v, D] and their labels [E, v]


class BLRHead(Head):
    """Bayesian logistic regression by SVGD on unit features (equation 14).

    Args:
        particles: number of class-weight particles.
        epochs, batch_size, learning_rate: of Adam.
        prior: the log prior of the class weights is -prior·|θ|².
        bandwidth: rule for κ between particles, `paper` or `liu-wang`.
        repulsion: of SVGD's particles; -1 makes them attract each other, see `particles.svgd_mixing`.
        cosine: class weights of unit length too: the softmax of a cosine instead of plain logits.
        random_state: seed of initial weights and minibatches.

    All heads of this module keep the parameters with the least training error, checked every 10 epochs;
    `fit_episodes` can be given a validation set to judge by instead, and a function to call at each check.
    """

    name = "blr"
    episodes_at_once = 24

    def __init__(
        self,
        particles: int = 10,
        epochs: int = 100,
        batch_size: int = 5,
        learning_rate: float = 1e-3,
        prior: float = 1e-3,
        bandwidth: Bandwidth = "paper",
        repulsion: float = 1.0,
        cosine: bool = False,
        random_state: int | None = 0,
    ) -> None:
        self.particles = particles
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.prior = prior
        self.bandwidth = bandwidth
        self.repulsion = repulsion
        self.cosine = cosine
        self.random_state = random_state

    def _layers(self, draws: Sequence[Draws], support: Tensor) -> Tensor | None:
        """The particles of a layer to start from, `[E, D, m, d]`, if the model has one."""
        return None

    def _similarity(self) -> Similarity:
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
        points, (judged, judged_labels) = unit(support), _scaled(validation)
        layers = Points(points, judged)
        if weights is not None:
            layers = FreeLayers(points, weights, "adam", self.learning_rate, judged)
        trained = train(
            layers, labels, theta, self._similarity(), orders,
            batch_size=self.batch_size, learning_rate=self.learning_rate, prior=self.prior,
            rule=self.bandwidth, repulsion=self.repulsion, judged_labels=judged_labels, on_check=on_check,
        )  # fmt: skip
        state = {"class_weights": trained.theta}
        return state if trained.weights is None else {"weights": trained.weights, **state}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(state.get("weights"), state["class_weights"])
        return predict(unit(query), particles, self._similarity())

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(state.get("weights"), state["class_weights"])
        return predict_by_particle(unit(query), particles, self._similarity())


def _scaled(validation: Validation | None) -> Validation | tuple[None, None]:
    return (None, None) if validation is None else (unit(validation[0]), validation[1])


@lru_cache(maxsize=8)
def _frequencies(latent: int, number: int, seed: int) -> Tensor:
    """The orthogonal random frequencies `[number, latent]` of a seed, at ℓ = 1; not to be written to."""
    generator = torch.Generator().manual_seed(seed)
    return random_frequencies(latent, number, orthogonal=True, generator=generator)


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
        start: what the layers are drawn from, `uniform` or `normal`, of the same deviation (Glorot's).
        optimizer: `adam`, `sgd` or `momentum`.
        kappa_every: steps between looks at κ of the layers and of the class weights, which hardly change
            from one step to the next.
        check_every: epochs between looks at the training error.
        span: where n < D, train by the values of the layers at the support points (`layers.SpanLayers`): many
            times faster, the same result for `sgd` and `momentum`, and for `adam` but for its factored second
            moment.
        particles, epochs, batch_size, learning_rate, prior, bandwidth, repulsion, random_state: as in
            `BLRHead`.
    """

    name = "dpkl"
    episodes_at_once = 8  # 8 MB of layers each

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
        repulsion: float = 1.0,
        start: Start = "uniform",
        optimizer: Optimizer = "adam",
        kappa_every: int = 25,
        check_every: int = 10,
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
        self.repulsion = repulsion
        self.start = start
        self.optimizer = optimizer
        self.kappa_every = kappa_every
        self.check_every = check_every
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
        number = self.frequencies or 10 * self.latent
        frequencies = _frequencies(self.latent, number, self.frequency_seed).to(like) / self.lengthscale
        blocks = frequencies.split(self.frequencies_per_step or self.latent)
        return FourierKernel(frequencies), [FourierKernel(block) for block in blocks]

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
        judged, judged_labels = _scaled(validation)
        similarity, of_steps = self._similarity(support)
        trained = train(
            span or FreeLayers(points, weights, self.optimizer, self.learning_rate, judged), labels,
            torch.stack(theta).to(support), self._judge(similarity) if validation is None else similarity,
            torch.stack(orders).to(labels.device), of_steps=of_steps, batch_size=self.batch_size,
            learning_rate=self.learning_rate, prior=self.prior, rule=self.bandwidth,
            repulsion=self.repulsion, kappa_every=self.kappa_every, check_every=self.check_every,
            optimizer=self.optimizer, judged_labels=judged_labels, on_check=on_check,
        )  # fmt: skip
        assert trained.weights is not None
        if span is None:
            weights = trained.weights
        else:
            span.add_to(weights, trained.weights)
        return {"weights": weights, "class_weights": trained.theta}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(state["weights"], state["class_weights"])
        return predict(unit(query), particles, self._similarity(query)[0])

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        particles = Particles(state["weights"], state["class_weights"])
        return predict_by_particle(unit(query), particles, self._similarity(query)[0])


class DBLRHead(DPKLHead):
    """Bayesian logistic regression on one deterministic layer: DPKL with a single particle.

    With one embedding and the exact kernel at ℓ = 1, log k(z, θ_c) is the cosine up to a constant, κ is 1
    and the functional gradient is the plain one.
    """

    name = "dblr"
    episodes_at_once = 24

    def __init__(
        self,
        latent: int = 128,
        particles: int = 10,
        epochs: int = 100,
        batch_size: int = 5,
        learning_rate: float = 1e-3,
        prior: float = 1e-3,
        bandwidth: Bandwidth = "paper",
        repulsion: float = 1.0,
        start: Start = "uniform",
        kappa_every: int = 25,
        span: bool = True,
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
            repulsion=repulsion,
            start=start,
            kappa_every=kappa_every,
            span=span,
            random_state=random_state,
        )


class BNNHead(BLRHead):
    """A Bayesian neural network: every particle is a layer D → `latent` with class weights of its own.

    SVGD moves all weights. Prior and repulsion act on every one of them, so it trains in all D dimensions.

    Args:
        latent: d, the width of the layer.
        cosine: layer output and class weights scaled to length one, as in DBLR and DPKL; else plain logits.
        particles, epochs, batch_size, learning_rate, prior, bandwidth, repulsion, random_state: as in
            `BLRHead`.
    """

    name = "bnn"

    def __init__(
        self,
        latent: int = 128,
        particles: int = 10,
        epochs: int = 100,
        batch_size: int = 5,
        learning_rate: float = 1e-3,
        prior: float = 1e-3,
        bandwidth: Bandwidth = "paper",
        repulsion: float = 1.0,
        cosine: bool = True,
        random_state: int | None = 0,
    ) -> None:
        super().__init__(
            particles, epochs, batch_size, learning_rate, prior, bandwidth, repulsion, cosine, random_state
        )
        self.latent = latent

    def _similarity(self) -> Similarity:
        return PairedProduct(normalised=self.cosine)

    def _layers(self, draws: Sequence[Draws], support: Tensor) -> Tensor:
        shape = (support.shape[-1], self.particles, self.latent)
        scale = (2 / (support.shape[-1] + self.latent)) ** 0.5  # Glorot
        return torch.stack([draw.normal(*shape) for draw in draws]).to(support).mul_(scale)
