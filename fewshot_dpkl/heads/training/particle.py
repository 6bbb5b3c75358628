"""Training of particle classifiers, for a batch of episodes.

One model serves BLR, DBLR, DPKL and BNN (section 3.3 of the paper, and MNIST in appendix B):

    embedding      z_il = relu(x_i w_l) / |relu(x_i w_l)|        m particles w_l, or z_i = x_i without a layer
    similarity     s_ic^p = log E_l k(z_il, θ_c^p)               P particles θ^p of the class weights
    probability    ρ_i^p = softmax_c s_ic^p,  p(y_i) = mean_p ρ_i^p

The embedding particles descend the functional gradient of -Σ log mean_p ρ (Algorithm 1), the class
weights follow SVGD towards their posterior. In a BNN every particle is a network (w_l, θ^l) of its
own, and SVGD moves all of it. This is the model, on any device; on a CPU `native.py` takes its steps in C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.heads.training import native
from fewshot_dpkl.heads.training.layers import Optimizer, Points, take, through
from fewshot_dpkl.heads.training.similarity import Similarity
from fewshot_dpkl.parallel import stop_if_unwanted
from fewshot_dpkl.particles import (
    Bandwidth,
    distances_from_products,
    particle_distances,
    particle_kernel,
    svgd_mixing,
)


@dataclass
class Particles:
    """The parameters of E models: `weights`, the `values` of their layers (None without), and `theta`."""

    weights: Tensor | None
    theta: Tensor  # E P C d


def normalise(h: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows of `h` `[..., d]` and the inverse of their former lengths `[..., 1]`, finite for zeros."""
    inverse = torch.linalg.vector_norm(h, dim=-1, keepdim=True).clamp_min(1e-12).reciprocal()
    return h * inverse, inverse


def embed(inputs: Tensor, weights: Tensor | None, normalised: bool = True) -> Tensor:
    """z `[E, b, m, d]` of inputs `[E, b, D]` under particles `[E, D, m, d]` (or the inputs themselves)."""
    return inputs[:, :, None] if weights is None else activate(through(inputs, weights), normalised)


def activate(hidden: Tensor, normalised: bool) -> Tensor:
    """z of the hidden layer x w_l `[..., d]`: the ReLU, and length one if `normalised`."""
    z = hidden.relu()
    return normalise(z)[0] if normalised else z


def class_log_probabilities(z: Tensor, theta: Tensor, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of embeddings `[E, b, m, d]` under class weights `[E, P, C, d]`."""
    flat = theta.flatten(1, 2)
    s = similarity(z, normalise(flat)[0] if similarity.normalised else flat)
    return s.unflatten(-1, theta.shape[1:3]).log_softmax(-1)


def answer(hidden: Tensor, theta: Tensor, similarity: Similarity, layered: bool) -> Tensor:
    """log ρ `[E, b, P, C]` of points by what their layers make of them, `[E, b, m, d]`; no gradients.

    What layers made of points is used up.
    """
    compiled = native.answer(hidden, theta, similarity, layered)
    if compiled is not None:
        return compiled
    with torch.no_grad():
        z = activate(hidden, similarity.normalised) if layered else hidden
        pieces = zip(z.split(4), theta.split(4), strict=True)  # of episodes: their waves are many times these
        return torch.cat([class_log_probabilities(*piece, similarity) for piece in pieces])


def predictive(log_rho: Tensor) -> Tensor:
    """log mean_p ρ^p: `[E, b, P, C]` to `[E, b, C]`."""
    if native.knows(log_rho):
        return native.log_means(log_rho)
    return log_rho.logsumexp(2) - math.log(log_rho.shape[2])


def predict_by_particle(inputs: Tensor, particles: Particles, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of inputs `[E, b, D]`: what each particle of the class weights says."""
    layered = particles.weights is not None
    hidden = through(inputs, particles.weights) if layered else inputs[:, :, None]  # type: ignore[arg-type]
    return answer(hidden, particles.theta, similarity, layered)


def predict(inputs: Tensor, particles: Particles, similarity: Similarity) -> Tensor:
    """log p `[E, b, C]` of inputs `[E, b, D]`."""
    return predictive(predict_by_particle(inputs, particles, similarity))


@dataclass
class Mixing:
    """What κ between the particles makes of their gradients.

    Attributes:
        layers: κ `[E, m, m]` of the layers, Algorithm 1 (None where they are a part of SVGD, or missing).
        scores: κ / P `[E, P, P]` of SVGD, by which it mixes the scores.
        drift: `[E, P, P]`, what repulsion and prior make of SVGD's particles themselves.
    """

    layers: Tensor | None
    scores: Tensor
    drift: Tensor


def look_at_kernels(
    theta: Tensor,
    between_layers: Tensor | None,
    *,
    joint: bool = False,
    prior: float,
    rule: Bandwidth = "paper",
    repulsion: float = 1.0,
    outside: Tensor | None = None,
) -> Mixing:
    """κ between the class weights `[E, P, C, d]`, and between layers at squared distances `[E, m, m]`.

    `joint` is that of `Similarity`, `outside` that of `SpanPoints`, the others those of `Training`.
    """
    distances, layers = particle_distances(theta.flatten(2)), None
    if outside is not None:
        distances = distances + distances_from_products(outside)
    if between_layers is not None:
        if joint:
            distances = distances + between_layers
        else:
            layers = particle_kernel(between_layers, rule)[0]
    scores, push = svgd_mixing(distances, rule, repulsion)
    return Mixing(layers, scores, 2 * prior * scores - push)


@torch.enable_grad()
def directions(
    hidden: Tensor,
    targets: Tensor,
    theta: Tensor,
    similarity: Similarity,
    mixing: Mixing,
    *,
    n: int,
    layered: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Descent directions of one minibatch: in `hidden` `[E, b, m, d]`, mixed by κ, and in theta.

    Class weights answer to each particle's own likelihood, scaled to all n points; the embedding to that of
    the mean over particles; a BNN's layer to its own network's, as its class weights do. Σ_l κ_il ∇_{w_l} L
    with ∇_{w_l} L = Xᵀ ∂L/∂(X w_l): mixing first, then Xᵀ, is far cheaper.

    Args:
        hidden: x_i w_l, `[E, b, m, d]` (points `[E, b, 1, d]` as they are if not `layered`).
        targets: `[E, b, C]` one-hot labels.
        theta: `[E, P, C, d]`.
        mixing: of κ between the particles, and what the prior makes of them.
        n: size of the support set, to which the log-likelihood of a minibatch is scaled.
    """
    b = hidden.shape[1]
    hidden, theta = (tensor.detach().requires_grad_() for tensor in (hidden, theta))
    z = activate(hidden, similarity.normalised) if layered else hidden
    log_rho = class_log_probabilities(z, theta, similarity)
    right = (log_rho * targets[:, :, None]).sum(-1)  # log ρ_y: E b P
    likelihood = right.sum() * (n / b)
    score = torch.autograd.grad(likelihood, theta, retain_graph=True)[0].flatten(2)
    theta_step = (mixing.drift @ theta.flatten(2) - mixing.scores @ score).detach().view_as(theta)
    if not layered:
        return None, theta_step
    loss = -likelihood if similarity.joint else -right.logsumexp(2).sum() / b
    gradient = torch.autograd.grad(loss, hidden)[0]
    kappa = mixing.scores if mixing.layers is None else mixing.layers
    return (kappa[:, None] @ gradient).detach(), theta_step


@dataclass
class Training:
    """Training of E models at once; `run` returns, for each, the parameters with the least error.

    Args:
        layers: of the support points; they bring their own optimiser.
        labels: `[E, n]` of the support points.
        theta: `[E, P, C, d]` class weights to start from.
        similarity: of the model.
        orders: `[E, epochs, n]`, the order of the points in every epoch.
        judge: what the error is measured with (default: the similarity of the model).
        optimizer: of the class weights.
        prior: the log prior of what SVGD moves is -prior·|θ|².
        rule, repulsion: of κ, see `particles.svgd_mixing`.
        kappa_every: steps between looks at κ.
        check_every: epochs between looks at the error (of equal errors the lower loss wins).
        judged_labels: `[E, v]` of the points that `layers` judge by, if those are not the support points.
        on_check: called after every look with the number of epochs done.
    """

    layers: Points
    labels: Tensor
    theta: Tensor
    similarity: Similarity
    orders: Tensor
    judge: Similarity | None = None
    batch_size: int = 5
    learning_rate: float = 1e-3
    prior: float = 1e-3
    rule: Bandwidth = "paper"
    repulsion: float = 1.0
    kappa_every: int = 1
    check_every: int = 10
    optimizer: Optimizer = "adam"
    judged_labels: Tensor | None = None
    on_check: Callable[[int], None] | None = None
    compiled = True  # whether C knows these steps

    @torch.no_grad()
    def run(self) -> Particles:
        self.theta = self.theta.clone()
        self.move_classes = self.layers.optimizer_of_classes(self.optimizer, self.theta, self.learning_rate)
        take_steps = native.steps_of(self) or self.take_steps
        layers, judge = self.layers, self.judge or self.similarity
        truth = self.labels if self.judged_labels is None else self.judged_labels
        best = Selection([self.theta] if layers.values is None else [self.theta, layers.values])
        epochs, n = self.orders.shape[1:]
        an_epoch = -(-n // self.batch_size)  # in steps
        for epoch in range(0, epochs, self.check_every):
            until = min(epoch + self.check_every, epochs)
            for step in range(epoch * an_epoch, until * an_epoch, 50):
                stop_if_unwanted()
                take_steps(step, min(step + 50, until * an_epoch))
            hidden = layers.hidden_of_judged()[:, : truth.shape[1]]  # unlabelled points are the last
            best.offer(predictive(answer(hidden, self.theta, judge, layers.values is not None)), truth)
            if self.on_check:
                self.on_check(until)
        theta, *values = best.kept
        return Particles(values[0] if values else None, theta)

    def take_steps(self, first: int, until: int) -> None:
        """The steps first, ..., until - 1, counted from the start of training, with torch."""
        layers, similarity, n = self.layers, self.similarity, self.orders.shape[2]
        targets = one_hot(self.labels, self.theta.dtype)
        for step in range(first, until):
            if step % self.kappa_every == 0:
                self.mixing = look_at_kernels(
                    self.theta, layers.distances(), joint=similarity.joint, prior=self.prior, rule=self.rule,
                    repulsion=self.repulsion, outside=layers.outside,
                )  # fmt: skip
            epoch, of_epoch = divmod(step, -(-n // self.batch_size))
            rows = self.orders[:, epoch, of_epoch * self.batch_size :][:, : self.batch_size]  # E b
            gradient, theta_step = directions(
                layers.hidden(rows), take(targets, rows), self.theta, similarity.of_step(step + 1),
                self.mixing, n=n, layered=layers.values is not None,
            )  # fmt: skip
            if gradient is not None:
                rows, gradient = self.with_more(step, rows, gradient)
                layers.move(rows, gradient, self.mixing.drift if similarity.joint else None)
            self.move_classes(theta_step)

    def with_more(self, step: int, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `[E, b]` and the layers' `gradient` `[E, b, m, d]` there, with what else they descend."""
        return rows, gradient


class Selection:
    """Keeps, for each episode, the parameters `[E, ...]` with the least error seen so far."""

    def __init__(self, current: Sequence[Tensor]) -> None:
        self.current = current
        self.kept = [tensor.clone() for tensor in current]
        self.error = torch.full((len(current[0]),), torch.inf, device=current[0].device)
        self.loss = self.error.clone()

    def offer(self, log_p: Tensor, labels: Tensor) -> None:
        """`log_p` `[E, n, C]` under the current parameters, `labels` `[E, n]` of the points to judge by."""
        error = (log_p.argmax(-1) != labels).float().mean(-1)
        loss = -log_p.gather(-1, labels[..., None]).mean((1, 2))
        better = (error < self.error) | ((error == self.error) & (loss < self.loss))
        self.error = torch.where(better, error, self.error)
        self.loss = torch.where(better, loss, self.loss)
        for kept, now in zip(self.kept, self.current, strict=True):
            for episode in better.nonzero().flatten().tolist():  # whole pieces: fancy indices are slow
                kept[episode] = now[episode]
