"""DPKL, the paper's head, and DBLR, its deterministic rival (section 3.3, appendices B.2 and C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import State, unit
from fewshot_dpkl.heads.bayesian import ParticleHead, Validation, scaled
from fewshot_dpkl.heads.training.draws import Draws, Start
from fewshot_dpkl.heads.training.layers import (
    FreeLayers,
    Optimizer,
    SpanLayers,
    rows_by_rows,
    through,
)
from fewshot_dpkl.heads.training.particle import answer
from fewshot_dpkl.heads.training.similarity import ExactKernel, FourierKernel, Similarity
from fewshot_dpkl.heads.training.variance import SemiSupervisedTraining
from fewshot_dpkl.kernels import hadamard_frequencies, hadamard_scales, random_frequencies

Kernel = Literal["rff", "exact"]
Rotation = Literal["hadamard", "uniform"]


@lru_cache(maxsize=8)
def _fourier_kernel(
    latent: int,
    number: int,
    per_step: int,
    seed: int,
    rotation: Rotation,
    lengthscale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> FourierKernel:
    """With the orthogonal random frequencies of a seed."""
    generator = torch.Generator().manual_seed(seed)
    if rotation == "hadamard" and latent & (latent - 1) == number % latent == 0:
        scales = hadamard_scales(latent, number, lengthscale=lengthscale, generator=generator)
        scales = scales.to(device, dtype)
        return FourierKernel(hadamard_frequencies(scales), per_step, scales)
    frequencies = random_frequencies(latent, number, orthogonal=True, generator=generator)
    return FourierKernel(frequencies.to(device, dtype) / lengthscale, per_step)


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
        rotation: of orthogonal frequencies: `hadamard` for products of signs and Hadamard's matrix (SORF; Yu
            et al., 2016), which take half the time, where `latent` is a power of two that divides R;
            `uniform` for any rotation alike.
        lengthscale: ℓ of the squared-exponential kernel.
        embeddings: m, the particles of the layer.
        latent: d, the width of the layer.
        start: what the layers are drawn from, all of the same deviation (Glorot's): `signs` for Hadamard's
            matrix whose rows have random signs (`draws.sign_weights`), through which points pass in a
            fraction of the time; it wants a `latent` that is a power of two and a D twice as large, and is
            `uniform` where these are not so. `uniform` or `normal` for independent weights.
        optimizer: `adam`, `sgd` or `momentum`.
        kappa_every: steps between looks at κ of the layers and of the class weights, which hardly change
            from one step to the next.
        check_every: epochs between looks at the training error.
        span: where n < D, train by the values of the layers at the support points (`layers.SpanLayers`): many
            times faster, the same result for `sgd` and `momentum`, and for `adam` but for its factored second
            moment.
        alpha: what the mean posterior variance of unlabelled examples weighs against the loss of the support
            set, where there are such (SSDPKL, section 3.3; `training/variance.py`).

    The others are those of `ParticleHead`.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import DPKLHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> DPKLHead(epochs=20, latent=16, learning_rate=0.1).fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "dpkl"
    episodes_at_once = 8  # 8 MB of layers each
    learns_from_unlabeled = True

    kernel: Kernel = "rff"
    frequencies: int | None = None
    frequencies_per_step: int | None = None
    rotation: Rotation = "hadamard"
    lengthscale: float = 1.0
    embeddings: int = 10
    latent: int = 128
    start: Literal["signs", "uniform", "normal"] = "signs"
    optimizer: Optimizer = "adam"
    kappa_every: int = 25
    check_every: int = 10
    span: bool = True
    frequency_seed: int = 0
    alpha: float = 1.0

    def _similarity(self, like: Tensor) -> Similarity:
        if self.kernel == "exact":
            return ExactKernel(self.lengthscale)
        if self.kernel != "rff":
            raise ValueError(f"unknown kernel {self.kernel!r}; use 'rff' or 'exact'")
        if self.rotation not in ("hadamard", "uniform"):
            raise ValueError(f"unknown rotation {self.rotation!r}; use 'hadamard' or 'uniform'")
        number, per_step = self.frequencies or 10 * self.latent, self.frequencies_per_step or self.latent
        of = (self.latent, number, per_step, self.frequency_seed, self.rotation, self.lengthscale)
        return _fourier_kernel(*of, like.dtype, like.device)

    def _judge(self, model: Similarity) -> Similarity:
        """What the training error is measured with: the kernel that random features estimate, far cheaper."""
        return ExactKernel(self.lengthscale)

    def _streams(self, draws: Sequence[Draws]) -> Tensor:
        """What the layers of episodes with these draws are drawn from: `[E, 4]`."""
        return torch.stack([draw.stream() for draw in draws])

    def _start(self, features: int, streams: Tensor | None, given: Tensor | None = None) -> Start:
        deviation = (2 / (features + self.latent)) ** 0.5  # Glorot
        fits = self.latent & (self.latent - 1) == 0 and features >= 2 * self.latent
        shape = (features, self.embeddings, self.latent)
        return Start(shape, deviation, streams, given, signs=fits and self.start == "signs")

    @torch.no_grad()
    def fit_episodes(
        self,
        support: Tensor,
        labels: Tensor,
        seeds: Sequence[int],
        unlabeled: Tensor | None = None,
        validation: Validation | None = None,
        on_check: Callable[[int], None] | None = None,
    ) -> State:
        n, features = support.shape[1:]
        points = unit(support if unlabeled is None else torch.cat([support, unlabeled], 1))
        in_span = self.span and points.shape[1] < features
        if validation is not None and in_span:
            raise ValueError("a validation set is not in the span of the support set; use span=False")
        draws = [Draws(seed) for seed in seeds]
        if self.start in ("signs", "uniform"):
            start = self._start(features, self._streams(draws))
        elif self.start == "normal":
            start = self._start(features, None)
            normal = torch.stack([draw.normal(*start.shape) for draw in draws])
            start.given = normal.mul_(start.deviation)
        else:
            raise ValueError(f"unknown start {self.start!r}; use 'signs', 'uniform' or 'normal'")
        shape = (self.particles, int(labels.max()) + 1, self.latent)
        theta = torch.stack([draw.normal(*shape) for draw in draws]).to(support) * self.latent**-0.5
        orders = torch.stack([draw.orders(self.epochs, n) for draw in draws]).to(labels.device)
        judged, judged_labels = scaled(validation)
        layers: SpanLayers | FreeLayers
        if in_span:
            layers = SpanLayers(points, start, self.optimizer, self.learning_rate)
        else:
            layers = FreeLayers(points, start.weights(support), self.optimizer, self.learning_rate, judged)
        similarity = self._similarity(support)
        trained = self._training(
            layers=layers, labels=labels, theta=theta, similarity=similarity, orders=orders,
            judge=self._judge(similarity) if validation is None else similarity, optimizer=self.optimizer,
            kappa_every=self.kappa_every, check_every=self.check_every, judged_labels=judged_labels,
            on_check=on_check, **({} if unlabeled is None else self._regulariser(draws, n, unlabeled)),
        ).run()  # fmt: skip
        assert trained.weights is not None
        state = {"weights": trained.weights, "class_weights": trained.theta}
        if isinstance(layers, FreeLayers):
            return state
        state = {"moved": trained.weights, "reach": layers.reach, "class_weights": trained.theta}
        if support.device.type == "cpu" and start.streams is not None:
            return {"start": start.streams, **state}
        return self.whole({"given": start.weights(support), **state})

    def _regulariser(self, draws: Sequence[Draws], n: int, unlabeled: Tensor) -> dict[str, Any]:
        """What training needs to know of unlabelled points `[E, u, D]`: as many a step as labelled ones."""
        u = unlabeled.shape[1]
        orders = torch.stack([draw.orders(max(1, 500 * n // u), u) for draw in draws])
        looks = (n + orders).flatten(1).unfold(1, min(n, u), min(n, u)).to(unlabeled.device)
        return dict(
            kind=SemiSupervisedTraining, alpha=self.alpha, lengthscale=self.lengthscale, looks=looks
        )  # fmt: skip

    def whole(self, state: State) -> State:
        """With all of the layers, where a state knows them by the stream they began from and their moves."""
        if "weights" in state:
            return state
        start = self._start(state["reach"].shape[-1], state.get("start"), state.get("given"))
        weights = start.weights(state["moved"])
        weights += through(state["reach"].transpose(-1, -2), state["moved"])
        return {"weights": weights, "class_weights": state["class_weights"]}

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        if "weights" in state:
            return super().particle_log_proba_episodes(state, query)
        # Layers are linear and their output is scaled to length one, so queries need not be.
        hidden = self._start(query.shape[-1], state["start"]).through(query)[0]
        hidden = through(rows_by_rows(query, state["reach"]), state["moved"], onto=hidden)
        return answer(hidden, state["class_weights"], self._similarity(query), layered=True)


@dataclass(eq=False, repr=False, kw_only=True)
class DBLRHead(DPKLHead):
    """Bayesian logistic regression on one deterministic layer: DPKL with a single particle.

    With one embedding and the exact kernel at ℓ = 1, log k(z, θ_c) is the cosine up to a constant, κ is 1
    and the functional gradient is the plain one. It takes the parameters of `DPKLHead` that are not fixed by
    this.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import DBLRHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> DBLRHead(epochs=20, latent=16, learning_rate=0.1).fit(X, y).predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
    """

    name = "dblr"
    episodes_at_once = 24

    kernel: Kernel = field(default="exact", init=False)
    embeddings: int = field(default=1, init=False)
    lengthscale: float = field(default=1.0, init=False)
    frequencies: int | None = field(default=None, init=False)
    frequencies_per_step: int | None = field(default=None, init=False)
    rotation: Rotation = field(default="hadamard", init=False)
    frequency_seed: int = field(default=0, init=False)
