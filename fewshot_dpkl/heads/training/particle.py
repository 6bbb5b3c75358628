"""Training of particle classifiers, for a batch of episodes and without autograd.

One model serves BLR, DBLR, DPKL and BNN (section 3.3 of the paper, and MNIST in appendix B):

    embedding      z_il = relu(x_i w_l) / |relu(x_i w_l)|        m particles w_l, or z_i = x_i without a layer
    similarity     s_ic^p = log E_l k(z_il, θ_c^p)               P particles θ^p of the class weights
    probability    ρ_i^p = softmax_c s_ic^p,  p(y_i) = mean_p ρ_i^p

The embedding particles descend the functional gradient of -Σ log mean_p ρ (Algorithm 1), the class
weights follow SVGD towards their posterior. In a BNN every particle is a network (w_l, θ^l) of its
own, and SVGD moves all of it. The gradients are written by hand, because recording them costs more than
computing them; the tests compare them with autograd. `compiled.py` takes the same steps in C, for DBLR and
DPKL in the span of the support set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.heads.training.compiled import compiled_steps
from fewshot_dpkl.heads.training.layers import (
    Adam,
    Descent,
    Optimizer,
    Points,
    SpanLayers,
    make_optimizer,
    take,
)
from fewshot_dpkl.heads.training.similarity import Similarity
from fewshot_dpkl.parallel import stop_if_unwanted
from fewshot_dpkl.particles import Bandwidth, particle_distances, particle_kernel, svgd_mixing


@dataclass
class Particles:
    """The parameters of E models: `weights` `[E, D, m, d]` (None without a layer), `theta` `[E, P, C, d]`."""

    weights: Tensor | None
    theta: Tensor


def inverse_lengths(h: Tensor) -> Tensor:
    """1/|h| of the rows of `h` `[..., d]`, finite where |h| is zero: `[..., 1]`."""
    return torch.linalg.vector_norm(h, dim=-1, keepdim=True).clamp_min_(1e-12).reciprocal_()


def normalise(h: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows of `h` `[..., d]` and the inverse of their former lengths `[..., 1]`."""
    inverse = inverse_lengths(h)
    return h * inverse, inverse


def across(grad: Tensor, unit: Tensor) -> Tensor:
    """What remains of `grad` `[..., d]`, in place, without its part along the unit vectors."""
    return grad.addcmul_(unit, (unit * grad).sum(-1, keepdim=True), value=-1)


def embed(inputs: Tensor, weights: Tensor | None, normalised: bool = True) -> Tensor:
    """z `[E, b, m, d]` of inputs `[E, b, D]` under particles `[E, D, m, d]` (or the inputs themselves)."""
    if weights is None:
        return inputs[:, :, None]
    return activate(torch.bmm(inputs, weights.flatten(2)).unflatten(-1, weights.shape[2:]), normalised)


def activate(hidden: Tensor, normalised: bool) -> Tensor:
    """z of the hidden layer x w_l `[..., d]`: the ReLU, and length one if `normalised`."""
    z = hidden.relu()
    return z.mul_(inverse_lengths(z)) if normalised else z


def class_log_probabilities(z: Tensor, theta: Tensor, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of embeddings `[E, b, m, d]` under class weights `[E, P, C, d]`."""
    flat = theta.flatten(1, 2)
    s = similarity.values(z, normalise(flat)[0] if similarity.normalised else flat)
    return s.unflatten(-1, theta.shape[1:3]).log_softmax(-1)


def predictive(log_rho: Tensor) -> Tensor:
    """log mean_p ρ^p: `[E, b, P, C]` to `[E, b, C]`."""
    return log_rho.logsumexp(2) - math.log(log_rho.shape[2])


def predict(inputs: Tensor, particles: Particles, similarity: Similarity) -> Tensor:
    """log p `[E, b, C]` of inputs `[E, b, D]`."""
    return torch.cat([predictive(piece) for piece in _by_particle(inputs, particles, similarity)])


def predict_by_particle(inputs: Tensor, particles: Particles, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of inputs `[E, b, D]`: what each particle of the class weights says."""
    return torch.cat(list(_by_particle(inputs, particles, similarity)))


def _by_particle(inputs: Tensor, particles: Particles, similarity: Similarity) -> Iterator[Tensor]:
    """log ρ `[4, b, P, C]` of four episodes at a time: their features stay in cache."""
    for start in range(0, len(inputs), 4):
        piece = slice(start, start + 4)
        weights = None if particles.weights is None else particles.weights[piece]
        z = embed(inputs[piece], weights, similarity.normalised)
        yield class_log_probabilities(z, particles.theta[piece], similarity)


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
) -> Mixing:
    """κ between the class weights `[E, P, C, d]`, and between layers at squared distances `[E, m, m]`.

    `joint` is that of `Similarity`, the others those of `train`.
    """
    distances, layers = particle_distances(theta.flatten(2)), None
    if between_layers is not None:
        if joint:
            distances += between_layers
        else:
            layers = particle_kernel(between_layers, rule)[0]
    scores, push = svgd_mixing(distances, rule, repulsion)
    return Mixing(layers, scores, push.neg_().add_(scores, alpha=2 * prior))


def directions(
    hidden: Tensor,
    targets: Tensor,
    theta: Tensor,
    similarity: Similarity,
    mixing: Mixing,
    *,
    n: int,
    prior: float,
    prior_mean: Tensor | float = 0.0,
    layered: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Descent directions of one minibatch: in `hidden` `[E, b, m, d]`, mixed by κ, and in theta.

    Σ_l κ_il ∇_{w_l} L with ∇_{w_l} L = Xᵀ ∂L/∂(X w_l): mixing first, then Xᵀ, is far cheaper.

    Args:
        hidden: x_i w_l, `[E, b, m, d]`, overwritten (points `[E, b, 1, d]` as they are if not `layered`).
        targets: `[E, b, C]` one-hot labels.
        theta: `[E, P, C, d]`.
        mixing: of κ between the particles, with the same prior.
        n: size of the support set, to which the log-likelihood of a minibatch is scaled.
        prior: the log prior of what SVGD moves is -prior·|θ|², or -prior·|θ - prior_mean|².
        prior_mean: `[E, 1, C, d]`, of the class weights.
    """
    grad_z, scale, grad_theta = gradients(hidden, targets, theta, similarity, n, layered)
    if isinstance(prior_mean, Tensor):
        grad_theta = grad_theta + 2 * prior * prior_mean.flatten(2)
    theta_step = torch.bmm(mixing.drift, theta.flatten(2)).baddbmm_(mixing.scores, grad_theta, alpha=-1)
    if grad_z is not None:
        kappa = -mixing.scores if mixing.layers is None else mixing.layers
        of_points = kappa[:, None] * scale.transpose(-1, -2)  # κ_il · scale_l: E b m m
        grad_z = torch.bmm(of_points.flatten(0, 1), grad_z.flatten(0, 1)).view_as(grad_z)
    return grad_z, theta_step.view_as(theta)


def gradients(
    hidden: Tensor, targets: Tensor, theta: Tensor, similarity: Similarity, n: int, layered: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of the loss in the hidden layer x w_l `[E, b, m, d]`, of the log likelihoods in theta `[E, P, Cd]`.

    The first is still to be multiplied by the second of the three, `[E, b, m, 1]`.

    Class weights answer to each particle's own likelihood, scaled to all n points; the embedding to that of
    the mean over particles, in which particle p has the weight ρ_y^p / Σ_p' ρ_y^p'. A BNN's layer answers to
    its own network's log likelihood, as its class weights do.
    """
    b, z, theta_unit = hidden.shape[1], hidden, theta.flatten(1, 2)
    inverse = z.new_ones(1, b, 1, 1)
    if layered:
        z.relu_()
    if similarity.normalised:
        theta_unit, theta_inverse = normalise(theta_unit)
        if layered:
            inverse = inverse_lengths(z)
            z.mul_(inverse)
    s = similarity.forward(z, theta_unit).view(len(theta), b, *theta.shape[1:3])  # E b P C
    if not similarity.bounded:
        s = s - s.amax(-1, keepdim=True)
    rho = s.exp()
    total = rho.sum(-1, keepdim=True)  # by hand: log_softmax is slow along few classes
    toward = targets[:, :, None] - rho.div_(total)  # ∂ log ρ_y / ∂s: E b P C
    own = toward.flatten(2) * (n / b)
    if not layered:
        of_embedding = None
    elif similarity.joint:
        of_embedding = own
    else:
        right = (s * targets[:, :, None]).sum(-1, keepdim=True) - total.log_()  # log ρ_y: E b P 1
        of_embedding = (toward * right.softmax(2).div_(-b)).flatten(2)
    grad_z, grad_theta = similarity.backward(of_embedding, own)
    if similarity.normalised:  # what points along a vector does not turn it
        grad_theta = across(grad_theta, theta_unit).mul_(theta_inverse)
        grad_z = None if grad_z is None else across(grad_z, z)
    if grad_z is not None:
        grad_z = torch.ops.aten.threshold_backward(grad_z, z, 0)  # the ReLU
    return grad_z, inverse, grad_theta.view_as(theta).flatten(2)


def train(
    layers: Points | SpanLayers,
    labels: Tensor,
    theta: Tensor,
    similarity: Similarity,
    orders: Tensor,
    *,
    of_steps: Sequence[Similarity] | None = None,
    batch_size: int,
    learning_rate: float,
    prior: float,
    prior_mean: Tensor | float = 0.0,
    rule: Bandwidth = "paper",
    repulsion: float = 1.0,
    kappa_every: int = 1,
    check_every: int = 10,
    optimizer: Optimizer = "adam",
    judged_labels: Tensor | None = None,
    on_check: Callable[[int], None] | None = None,
) -> Particles:
    """Train E models at once and return, for each, `layers.values` and class weights with the least error.

    Args:
        layers: of the support points; they bring their own optimiser.
        labels: `[E, n]` of the support points.
        theta: `[E, P, C, d]` class weights to start from.
        similarity: of the model; it judges the error.
        orders: `[E, epochs, n]`, the order of the points in every epoch.
        of_steps: cheaper estimates of `similarity`, one for each step in turn (default: itself).
        optimizer: of the class weights.
        rule, repulsion: of κ, see `particles.svgd_mixing`.
        kappa_every: steps between looks at κ.
        check_every: epochs between looks at the error (of equal errors the lower loss wins).
        judged_labels: `[E, v]` of the points that `layers` judge by, if those are not the support points.
        on_check: called after every look with the number of epochs done.
    """
    with torch.inference_mode():  # less bookkeeping for every small operation
        of_steps = of_steps or [similarity]
        truth = labels if judged_labels is None else judged_labels
        theta = theta.clone()
        move_classes = make_optimizer(optimizer, theta, learning_rate)
        state = (layers, labels, theta, move_classes, of_steps, orders, batch_size)
        compiled = None if isinstance(prior_mean, Tensor) else compiled_steps(*state)
        take_steps = compiled or Steps(*state, prior, prior_mean)
        best = Selection([theta] if layers.values is None else [theta, layers.values])
        epochs, n = orders.shape[1:]
        an_epoch = -(-n // batch_size)  # in steps
        step, last, between_checks = 0, epochs * an_epoch, check_every * an_epoch
        while step < last:
            stop_if_unwanted()
            if step % kappa_every == 0:
                mixing = look_at_kernels(
                    theta,
                    layers.distances(),
                    joint=similarity.joint,
                    prior=prior,
                    rule=rule,
                    repulsion=repulsion,
                )
            until = min(last, *(step - step % every + every for every in (kappa_every, between_checks)))
            take_steps(step, until, mixing)
            step = until
            if step % between_checks == 0 or step == last:
                best.offer(_judge(layers, theta, similarity), truth)
                if on_check:
                    on_check(step // an_epoch)
    theta, *values = (tensor.clone() for tensor in best.kept)
    return Particles(values[0] if values else None, theta)


class Steps:
    """Takes the steps of `train` with torch, on any device and for every model."""

    def __init__(
        self,
        layers: Points | SpanLayers,
        labels: Tensor,
        theta: Tensor,
        move_classes: Adam | Descent,
        of_steps: Sequence[Similarity],
        orders: Tensor,
        batch_size: int,
        prior: float,
        prior_mean: Tensor | float,
    ) -> None:
        self.layers, self.theta, self.move_classes, self.of_steps = layers, theta, move_classes, of_steps
        self.targets, self.orders, self.batch_size = one_hot(labels, theta.dtype), orders, batch_size
        self.prior, self.prior_mean = prior, prior_mean

    def __call__(self, first: int, until: int, mixing: Mixing) -> None:
        """Take the steps first, ..., until - 1, counted from the start of training."""
        n = self.orders.shape[2]
        for step in range(first, until):
            epoch, of_epoch = divmod(step, -(-n // self.batch_size))
            if of_epoch == 0:
                self.layers.shuffle(self.orders[:, epoch])
                self.shuffled = take(self.targets, self.orders[:, epoch])
            begin = of_epoch * self.batch_size
            batch = slice(begin, min(begin + self.batch_size, n))
            gradient, theta_step = directions(
                self.layers.hidden(batch),
                self.shuffled[:, batch],
                self.theta,
                self.of_steps[(step + 1) % len(self.of_steps)],
                mixing,
                n=n,
                prior=self.prior,
                prior_mean=self.prior_mean,
                layered=self.layers.values is not None,
            )
            if gradient is not None:
                self.layers.move(batch, gradient, None if mixing.layers is not None else mixing.drift)
            self.move_classes(theta_step)


def _judge(layers: Points | SpanLayers, theta: Tensor, similarity: Similarity) -> Tensor:
    """log p `[E, v, C]` of the points that `layers` judge by."""
    z = layers.hidden_of_judged()
    if layers.values is not None:
        z = activate(z, similarity.normalised)
    pieces = zip(z.split(4), theta.split(4), strict=True)  # they stay in cache
    return torch.cat([predictive(class_log_probabilities(*piece, similarity)) for piece in pieces])


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
            kept[better] = now[better]
