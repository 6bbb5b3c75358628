"""The layers x → x w_l of a particle classifier: what they make of the support points, and how they move.

`Points` has no layer, `FreeLayers` moves every weight, and `SpanLayers` trains the same layers with n/D of
the work by the support-span identity: a step of gradient descent changes W by XᵀA, so the values XW at the
support points change by XXᵀA, and training needs no W at all.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

from fewshot_dpkl.heads.base import widest
from fewshot_dpkl.heads.span import roots
from fewshot_dpkl.particles import distances_from_products

Optimizer = Literal["adam", "sgd", "momentum"]
MOMENTUM = 0.9  # of momentum and of Adam
SECOND, EPSILON = 0.999, 1e-8  # of Adam


class Points:
    """No layer: the points `[E, n, r]` are their own embeddings.

    Args:
        judged: points `[E, v, r]` to measure the error on (default: the support points).
    """

    values: Tensor | None = None
    """`[E, r, m, d]`, what training moves."""

    def __init__(self, points: Tensor, judged: Tensor | None = None) -> None:
        self.points = points
        self.judged = points if judged is None else judged

    def shuffle(self, order: Tensor) -> None:
        """The order `[E, n]` of the points in the epoch that begins; minibatches are slices of it."""
        self.shuffled = take(self.points, order)

    def hidden(self, batch: slice) -> Tensor:
        """What the layers make of a minibatch, before the ReLU: `[E, b, m, d]`."""
        return self.shuffled[:, batch, None]

    def hidden_of_judged(self) -> Tensor:
        """The same of the points that the error is measured on: `[E, v, m, d]`, not to be written to."""
        return self.judged[:, :, None]

    def distances(self) -> Tensor | None:
        """Squared distances between the m layers: `[E, m, m]`."""
        return None

    def move(self, batch: slice, gradient: Tensor, drift: Tensor | None) -> None:
        """A step: `gradient` `[E, b, m, d]` is that of the loss in `hidden`, mixed by κ.

        `drift` `[E, m, m]` is what prior and repulsion of SVGD make of the layers themselves.
        """


class FreeLayers(Points):
    """m layers whose D × d weights all move, from `weights` `[E, D, m, d]`."""

    values: Tensor

    def __init__(
        self,
        points: Tensor,
        weights: Tensor,
        optimizer: Optimizer,
        learning_rate: float,
        judged: Tensor | None = None,
    ) -> None:
        super().__init__(points, judged)
        self.values = weights.clone()
        self.direction = torch.empty_like(weights)  # kept: fresh memory would cost more
        self.optimise = make_optimizer(optimizer, self.values, learning_rate)

    def _through(self, points: Tensor) -> Tensor:
        # What the m layers make of one input lies side by side, so that one matrix product serves them all.
        return torch.bmm(points, self.values.flatten(2)).unflatten(-1, self.values.shape[2:])

    def hidden(self, batch: slice) -> Tensor:
        return self._through(self.shuffled[:, batch])

    def hidden_of_judged(self) -> Tensor:
        return self._through(self.judged)

    def distances(self) -> Tensor:
        return distances_from_products(layer_products(self.values))

    def move(self, batch: slice, gradient: Tensor, drift: Tensor | None) -> None:
        points = self.shuffled[:, batch].transpose(-1, -2)
        torch.bmm(points, gradient.flatten(2), out=self.direction.flatten(2))
        if drift is not None:
            of_rows = drift.repeat_interleave(self.values.shape[1], dim=0)  # ED m m
            self.direction.flatten(0, 1).baddbmm_(of_rows, self.values.flatten(0, 1))
        self.optimise(self.direction)


class SpanLayers:
    """m layers known by their values XW at the support points: n numbers a unit instead of D.

    The gradient of any loss of XW in W is XᵀA, and the optimisers here step along CXᵀP, where P is made of
    the A so far and C scales the features. So XW moves by KP with K = XCXᵀ, and W = W₀ + CXᵀK⁺(XW - XW₀).

    - SGD and momentum have C = 1: the steps are those that they take in all D dimensions.
    - Adam divides the gradient g_kj by the root of its mean square v_kj, one number for every weight. Here it
      is factored, v_kj = r_k u_j, as in Adafactor (Shazeer & Stern, 2018): r_k = mean_i x_ik² belongs to
      feature k and is known from the start, u_j = mean_k g_kj²/r_k to unit j, averaged over the steps. Then
      C = diag(r_k)^(-1/2), and the steps are again those that this optimiser takes in all D dimensions.

    Args:
        points: support points `[E, n, D]`, n < D.
        embeddings, latent: m and d.
    """

    def __init__(
        self, points: Tensor, embeddings: int, latent: int, optimizer: Optimizer, learning_rate: float
    ) -> None:
        check_optimizer(optimizer)
        self.adam, self.learning_rate, self.steps = optimizer == "adam", learning_rate, 0
        self.keep = 0.0 if optimizer == "sgd" else MOMENTUM  # of the directions so far
        x = reach = widest(points)
        if self.adam:
            shares = x.square().mean(1)  # r_k: E D
            reach = x * torch.where(shares > 0, shares, torch.inf).rsqrt()[:, None]  # XC
        kernel, overlap = (reach @ other.transpose(-1, -2) for other in (x, reach))  # XCXᵀ and XC²Xᵀ: E n n
        root, inverse_root = roots(overlap)
        inverse = torch.linalg.pinv(kernel, rtol=1e-7, hermitian=True)  # points may be there twice
        self.kernel, self.reach, self.inverse = (t.to(points) for t in (kernel, reach, inverse))
        self.to_coordinates = (root @ inverse).to(points)  # of W's move, in an orthonormal basis of its span
        self.probes = torch.cat([x, inverse_root @ reach], 1).to(points)  # E 2n D
        if self.adam:  # a's mean square over the features is a·(XC²Xᵀ/D)·a, those that are always zero aside
            self.mean_squares = (overlap / (shares > 0).sum(-1).clamp_min(1)[:, None, None]).to(points)
        episodes, n, _ = points.shape
        self.begun = points.new_zeros(episodes, 2 * n, embeddings * latent)  # XW₀ and its coordinates
        self.products = points.new_zeros(episodes, embeddings, embeddings)  # of the layers W₀
        self.shape = (episodes, n, embeddings, latent)

    def begin(self, episode: int, features: slice, weights: Tensor) -> None:
        """Rows `[rows, m, d]`, those of the given features, of the layers that an episode starts from."""
        self.begun[episode].addmm_(self.probes[episode, :, features], weights.flatten(1))
        self.products[episode] += layer_products(weights[None])[0]

    @cached_property
    def start(self) -> Tensor:
        """XW₀: E n md."""
        return self.begun.chunk(2, 1)[0]

    @cached_property
    def offset(self) -> Tensor:
        """The coordinates of W₀ less those that its values stand for: E n md."""
        return torch.baddbmm(self.begun.chunk(2, 1)[1], self.to_coordinates, self.start, alpha=-1)

    @cached_property
    def outside(self) -> Tensor:
        """Products of what is outside the span, which does not move: E m m."""
        return self.products - layer_products(self.begun.chunk(2, 1)[1].reshape(self.shape))

    @cached_property
    def values(self) -> Tensor:
        return self.start.reshape(self.shape).clone()  # XW

    @cached_property
    def direction(self) -> Tensor:
        return torch.zeros_like(self.values).flatten(2)  # KP

    @cached_property
    def square(self) -> Tensor:
        return torch.zeros_like(self.direction[:, :1])  # u_j

    def shuffle(self, order: Tensor) -> None:
        self.rows = among_all(order)
        self.kernel_rows = take(self.kernel, order)  # E n n
        if self.adam:
            self.mean_square_rows = take(take(self.mean_squares, order).transpose(-1, -2).contiguous(), order)

    def hidden(self, batch: slice) -> Tensor:
        rows = self.rows[:, batch]
        taken = self.values.flatten(0, 1).index_select(0, rows.flatten())
        return taken.view(*rows.shape, *self.values.shape[2:])

    def hidden_of_judged(self) -> Tensor:
        return self.values

    def distances(self) -> Tensor:
        coordinates = torch.baddbmm(self.offset, self.to_coordinates, self.values.flatten(2))
        return distances_from_products(self.outside + layer_products(coordinates.view(self.shape)))

    def move(self, batch: slice, gradient: Tensor, drift: Tensor | None) -> None:
        gradient = gradient.flatten(2)  # E b md
        self.steps += 1
        kernel = self.kernel_rows[:, batch].transpose(-1, -2)  # E n b
        values = self.values.flatten(2)
        if not self.adam:
            self.direction.baddbmm_(kernel, gradient, beta=self.keep)
            values.sub_(self.direction, alpha=self.learning_rate)
            return
        squares = torch.bmm(self.mean_square_rows[:, batch, batch], gradient).mul_(gradient)  # to be summed
        self.square.lerp_(squares.sum(1, keepdim=True), 1 - SECOND)
        correction = 1 - SECOND**self.steps
        rate = self.learning_rate * correction**0.5 / (1 - self.keep**self.steps)
        root = self.square.add(EPSILON**2 * correction).rsqrt_()
        self.direction.baddbmm_(kernel, gradient, beta=self.keep, alpha=1 - self.keep)
        values.addcmul_(self.direction, root, value=-rate)

    def add_to(self, weights: Tensor, values: Tensor) -> None:
        """Turn the layers `[E, D, m, d]` that training began from into those with `values` `[E, n, m, d]`."""
        moved = torch.bmm(self.inverse, values.flatten(2) - self.start)
        for e in range(len(weights)):  # one at a time: each is megabytes
            weights[e].flatten(1).addmm_(self.reach[e].T, moved[e])


def take(rows: Tensor, order: Tensor) -> Tensor:
    """Rows of `[E, n, ...]` in the order `[E, n]`."""
    return rows.flatten(0, 1).index_select(0, among_all(order).flatten()).view_as(rows)


def among_all(order: Tensor) -> Tensor:
    """Row numbers `[E, n]` within episodes, as row numbers among those of all episodes."""
    episodes, n = order.shape
    return order + n * torch.arange(episodes, device=order.device)[:, None]


def layer_products(weights: Tensor) -> Tensor:
    """Inner products between the m layers of `weights` `[E, r, m, d]`: `[E, m, m]`."""
    products = weights.new_zeros(len(weights), weights.shape[2], weights.shape[2])
    for rows in weights.split(200, dim=1):  # they stay in cache
        by_layer = rows.transpose(1, 2).flatten(2)  # copied: one long product is faster than many short ones
        products.baddbmm_(by_layer, by_layer.transpose(-1, -2))
    return products


def check_optimizer(optimizer: str) -> None:
    if optimizer not in ("adam", "sgd", "momentum"):
        raise ValueError(f"unknown optimizer {optimizer!r}; use 'adam', 'sgd' or 'momentum'")


class Adam:
    """Moves a tensor by one step at each call, given its descent direction."""

    def __init__(self, tensor: Tensor, learning_rate: float) -> None:
        self.tensor, self.learning_rate = tensor, learning_rate
        self.mean, self.square = torch.zeros_like(tensor), torch.zeros_like(tensor)
        self.count = torch.zeros((), device=tensor.device)

    def __call__(self, move: Tensor) -> None:
        # torch's own step without the bookkeeping around it, which costs as much again on small tensors
        adam(
            [self.tensor], [move], [self.mean], [self.square], [], [self.count], lr=self.learning_rate,
            beta1=MOMENTUM, beta2=SECOND, eps=EPSILON, weight_decay=0.0, fused=True, amsgrad=False,
            maximize=False,
        )  # fmt: skip


class Descent:
    """The same with gradient descent, with or without momentum."""

    def __init__(self, tensor: Tensor, learning_rate: float, keep: float) -> None:
        self.tensor, self.learning_rate, self.keep = tensor, learning_rate, keep
        self.mean = torch.zeros_like(tensor)

    def __call__(self, move: Tensor) -> None:
        self.mean.mul_(self.keep).add_(move)
        self.tensor.sub_(self.mean, alpha=self.learning_rate)


def make_optimizer(name: Optimizer, tensor: Tensor, learning_rate: float) -> Adam | Descent:
    """All are elementwise, so that stacked episodes do not touch each other."""
    check_optimizer(name)
    if name == "adam":
        return Adam(tensor, learning_rate)
    return Descent(tensor, learning_rate, MOMENTUM if name == "momentum" else 0.0)
