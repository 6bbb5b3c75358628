"""The layers x → x w_l of a particle classifier: what they make of the support points, and how they move.

`Points` has no layer, `FreeLayers` moves every weight, and `SpanLayers` trains the same layers with n/D of
the work by the support-span identity: a step of gradient descent changes W by XᵀA, so training needs to know
only A, n numbers a unit, and what the layers make of the support points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fewshot_dpkl.heads.span import support_span
from fewshot_dpkl.heads.training import native
from fewshot_dpkl.heads.training.draws import Start
from fewshot_dpkl.particles import distances_from_products

Optimizer = Literal["adam", "sgd", "momentum"]
Move = Callable[[Tensor], None]  # of a tensor, given its descent direction
MOMENTUM = 0.9  # of momentum and of Adam
SECOND, EPSILON = 0.999, 1e-8  # of Adam


class Points:
    """No layer: the points `[E, n, r]` are their own embeddings.

    Args:
        judged: points `[E, v, r]` to measure the error on (default: the support points).
    """

    values: Tensor | None = None
    """What training moves: `[E, ., m, d]`."""
    outside: Tensor | None = None
    """Products `[E, P, P]` of the parts of the class weights that training leaves as they are."""

    def __init__(self, points: Tensor, judged: Tensor | None = None) -> None:
        self.points = points
        self.judged = points if judged is None else judged

    def hidden(self, rows: Tensor) -> Tensor:
        """What the layers make of some points, `[E, b]`, before the ReLU: `[E, b, m, d]`."""
        return take(self.points, rows)[:, :, None]

    def hidden_of_judged(self) -> Tensor:
        """The same of the points that the error is measured on: `[E, v, m, d]`."""
        return self.judged[:, :, None]

    def products(self) -> Tensor | None:
        """Inner products between the m layers: `[E, m, m]`."""
        return None

    def distances(self) -> Tensor | None:
        """Squared distances between the m layers: `[E, m, m]`."""
        products = self.products()
        return None if products is None else distances_from_products(products)

    def move(self, rows: Tensor, gradient: Tensor, drift: Tensor | None) -> None:
        """A step: `gradient` `[E, b, m, d]` is that of the loss in `hidden`, mixed by κ.

        `drift` `[E, m, m]` is what prior and repulsion of SVGD make of the layers themselves.
        """

    def optimizer_of_classes(self, name: Optimizer, theta: Tensor, learning_rate: float) -> Move:
        """What moves the class weights `[E, P, C, d]`."""
        return make_optimizer(name, theta, learning_rate)


class SpanPoints(Points):
    """No layer, and class weights θ `[E, P, C, D]` known by their coordinates in the span of the points.

    What the points say of θ lies in their span, so n coordinates move, and the rest of θ stays what it was.
    Prior and repulsion act inside the span; κ knows all of θ. A coordinate is no feature, so Adam has one
    second moment for all of a class weight: its steps are the same in any basis of the span.

    Args:
        points: support points `[E, n, D]`, n < D; `self.points` are their coordinates `[E, n, n]`.
        theta: class weights to start from; `start` are their coordinates `[E, P, C, n]`.
    """

    outside: Tensor

    def __init__(self, points: Tensor, theta: Tensor) -> None:
        span = support_span(points)
        assert span.basis is not None
        super().__init__(span.coordinates)
        self.theta, self.basis = theta, span.basis  # E P C D, E n D
        self.shown = (points != 0).any(1).sum(-1).clamp_min(1).to(points)  # features not always zero: E
        self.start = (theta.flatten(1, 2) @ self.basis.mT).unflatten(1, theta.shape[1:3])
        whole, inside = theta.flatten(2), self.start.flatten(2)
        self.outside = whole @ whole.mT - inside @ inside.mT

    def class_weights(self, coordinates: Tensor) -> Tensor:
        """θ `[E, P, C, D]` where its coordinates are these."""
        moved = (coordinates - self.start).flatten(1, 2) @ self.basis
        return self.theta + moved.view_as(self.theta)

    def optimizer_of_classes(self, name: Optimizer, theta: Tensor, learning_rate: float) -> Move:
        assert name == "adam"
        return RowAdam(theta, learning_rate, self.shown)


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
        self.optimise = make_optimizer(optimizer, self.values, learning_rate)

    def hidden(self, rows: Tensor) -> Tensor:
        return through(take(self.points, rows), self.values)

    def hidden_of_judged(self) -> Tensor:
        return through(self.judged, self.values)

    def products(self) -> Tensor:
        return layer_products(self.values)

    def move(self, rows: Tensor, gradient: Tensor, drift: Tensor | None) -> None:
        direction = through(take(self.points, rows).transpose(-1, -2), gradient)
        if drift is not None:
            direction += torch.einsum("eij,ekjd->ekid", drift, self.values)
        self.optimise(direction)


class SpanLayers(Points):
    """m layers W = W₀ + CXᵀB known by B, `values`: n numbers a unit instead of D.

    The gradient of any loss of XW in W is XᵀA, and the optimisers here step along CXᵀP, where P is made of
    the A so far and C scales the features. So W stays W₀ + CXᵀB, and XW = XW₀ + KB with K = XCXᵀ.

    - SGD and momentum have C = 1: the steps are those that they take in all D dimensions.
    - Adam divides the gradient g_kj by the root of its mean square v_kj, one number for every weight. Here it
      is factored, v_kj = r_k u_j, as in Adafactor (Shazeer & Stern, 2018): r_k = mean_i x_ik² belongs to
      feature k and is known from the start, u_j = mean_k g_kj²/r_k to unit j, averaged over the steps. Then
      C = diag(r_k)^(-1/2), and the steps are again those that this optimiser takes in all D dimensions.

    Args:
        points: support points `[E, n, D]`.
        start: W₀, m layers to d units.
    """

    values: Tensor

    def __init__(self, points: Tensor, start: Start, optimizer: Optimizer, learning_rate: float) -> None:
        super().__init__(points)
        check_optimizer(optimizer)
        self.adam, self.learning_rate, self.steps = optimizer == "adam", learning_rate, 0
        self.keep = 0.0 if optimizer == "sgd" else MOMENTUM  # of the directions so far
        self.reach = points
        if self.adam:
            shares = points.square().mean(1)  # r_k: E D
            self.reach = points * torch.where(shares > 0, shares, torch.inf).rsqrt()[:, None]  # XC
            self.shown = (shares > 0).sum(-1).clamp_min(1).to(points)  # features that are not always zero: E
        self.kernel, self.overlap = (
            rows_by_rows(self.reach, other) for other in (points, self.reach)
        )  # XCXᵀ and XC²Xᵀ: E n n
        self.begun, self.products_of_start = start.through(points, products=True)  # XW₀: E n m d
        self.reached = start.through(self.reach)[0] if self.adam else self.begun  # XCW₀: E n m d
        self.values = torch.zeros_like(self.begun)  # B
        self.direction = torch.zeros_like(self.begun)  # P
        self.square = torch.zeros_like(self.begun[:, 0])  # u_j

    def hidden(self, rows: Tensor) -> Tensor:
        return through(take(self.kernel, rows), self.values, onto=take(self.begun, rows))

    def hidden_of_judged(self) -> Tensor:
        return through(self.kernel, self.values, onto=self.begun)

    def products(self) -> Tensor:
        both = layer_products(self.values, self.reached + through(self.overlap, self.values) / 2)
        return self.products_of_start + both + both.transpose(-1, -2)

    def move(self, rows: Tensor, gradient: Tensor, drift: Tensor | None) -> None:
        self.steps += 1
        index = rows[..., None, None].expand_as(gradient)
        self.direction *= self.keep
        if not self.adam:
            self.direction.scatter_add_(1, index, gradient)
            self.values -= self.learning_rate * self.direction
            return
        self.direction.scatter_add_(1, index, (1 - self.keep) * gradient)
        overlap = take(take(self.overlap, rows).transpose(-1, -2), rows)  # E b b
        squares = (through(overlap, gradient) * gradient).sum(1) / self.shown[:, None, None]  # E m d
        self.square.lerp_(squares, 1 - SECOND)
        correction = 1 - SECOND**self.steps
        rate = self.learning_rate * correction**0.5 / (1 - self.keep**self.steps)
        self.values -= rate * self.direction * (self.square + EPSILON**2 * correction).rsqrt()[:, None]


def through(points: Tensor, weights: Tensor, onto: Tensor | None = None) -> Tensor:
    """What layers `[E, D, m, d]` make of points `[E, b, D]`, plus `onto` if there is one: `[E, b, m, d]`."""
    # What the m layers make of one input lies side by side, so that one matrix product serves them all.
    wide, onto = weights.flatten(2), None if onto is None else onto.flatten(2)
    if native.knows(points, weights):
        out = native.product(points, wide, onto)
    else:
        out = torch.bmm(points, wide) if onto is None else torch.baddbmm(onto, points, wide)
    return out.unflatten(-1, weights.shape[2:])


def rows_by_rows(a: Tensor, b: Tensor) -> Tensor:
    """Products of the rows of `[E, q, D]` with those of `[E, n, D]`: `[E, q, n]`."""
    return native.product_of_rows(a, b) if native.knows(a, b) else a @ b.mT


def take(rows: Tensor, order: Tensor) -> Tensor:
    """Rows `[E, n, ...]` by their numbers `[E, b]`: `[E, b, ...]`."""
    episodes, n = rows.shape[:2]
    among_all = order + n * torch.arange(episodes, device=order.device)[:, None]
    return rows.flatten(0, 1).index_select(0, among_all.flatten()).view(*order.shape, *rows.shape[2:])


def layer_products(weights: Tensor, other: Tensor | None = None) -> Tensor:
    """Inner products between the m layers of `weights` and those of `other`, `[E, r, m, d]`: `[E, m, m]`."""
    return torch.einsum("erid,erjd->eij", weights, weights if other is None else other)


def check_optimizer(optimizer: str) -> None:
    if optimizer not in ("adam", "sgd", "momentum"):
        raise ValueError(f"unknown optimizer {optimizer!r}; use 'adam', 'sgd' or 'momentum'")


class Adam:
    """Moves a tensor by one step at each call, given its descent direction."""

    def __init__(self, tensor: Tensor, learning_rate: float) -> None:
        self.tensor, self.learning_rate, self.steps = tensor, learning_rate, 0
        self.mean, self.square = torch.zeros_like(tensor), torch.zeros_like(tensor)

    def __call__(self, move: Tensor) -> None:
        self.steps += 1
        self.mean.lerp_(move, 1 - MOMENTUM)
        self.square.mul_(SECOND).addcmul_(move, move, value=1 - SECOND)
        root = self.square.sqrt().div_((1 - SECOND**self.steps) ** 0.5).add_(EPSILON)
        self.tensor.addcdiv_(self.mean, root, value=-self.learning_rate / (1 - MOMENTUM**self.steps))


class RowAdam:
    """Adam on `[E, P, C, d]` with one second moment a row: the mean over `number` `[E]` features."""

    def __init__(self, tensor: Tensor, learning_rate: float, number: Tensor) -> None:
        self.tensor, self.learning_rate, self.steps = tensor, learning_rate, 0
        self.number = number
        self.mean, self.square = torch.zeros_like(tensor), torch.zeros_like(tensor[..., 0])

    def __call__(self, move: Tensor) -> None:
        self.steps += 1
        self.mean.lerp_(move, 1 - MOMENTUM)
        self.square.lerp_(move.square().sum(-1) / self.number[:, None, None], 1 - SECOND)
        root = (self.square / (1 - SECOND**self.steps)).sqrt() + EPSILON
        self.tensor -= self.learning_rate / (1 - MOMENTUM**self.steps) * self.mean / root[..., None]


class Descent:
    """The same with gradient descent, with or without momentum."""

    def __init__(self, tensor: Tensor, learning_rate: float, keep: float) -> None:
        self.tensor, self.learning_rate, self.keep = tensor, learning_rate, keep
        self.mean = torch.zeros_like(tensor)

    def __call__(self, move: Tensor) -> None:
        self.mean.mul_(self.keep).add_(move)
        self.tensor.sub_(self.mean, alpha=self.learning_rate)


def make_optimizer(name: Optimizer, tensor: Tensor, learning_rate: float) -> Move:
    """All are elementwise, so that stacked episodes do not touch each other."""
    check_optimizer(name)
    if name == "adam":
        return Adam(tensor, learning_rate)
    return Descent(tensor, learning_rate, MOMENTUM if name == "momentum" else 0.0)
