"""Training of particle classifiers, for a batch of episodes and without autograd.

One model serves BLR, DBLR, DPKL and BNN (section 3.3 of the paper, and MNIST in appendix B):

    embedding      z_il = relu(x_i w_l) / |relu(x_i w_l)|        m particles w_l, or z_i = x_i without a layer
    similarity     s_ic^p = log E_l k(z_il, θ_c^p)               P particles θ^p of the class weights
    probability    ρ_i^p = softmax_c s_ic^p,  p(y_i) = mean_p ρ_i^p

The embedding particles descend the functional gradient of -Σ log mean_p ρ (Algorithm 1), the class
weights follow SVGD towards their posterior. In a BNN every particle is a network (w_l, θ^l) of its
own, and SVGD moves all of it. The gradients are written by hand, because recording them costs more than
computing them; the tests compare them with autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam

from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.particles import (
    Bandwidth,
    distances_from_products,
    particle_distances,
    particle_kernel,
    svgd_mixing,
)

Optimizer = Literal["adam", "sgd", "momentum"]


class Similarity(Protocol):
    """s = log of the mean kernel between embeddings and class weights, and its two gradients."""

    normalised: bool  # whether embeddings and class weights are scaled to length one first
    joint: bool = False  # whether w_l and θ^l are one particle, moved by SVGD as a whole

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        """`z` `[E, b, m, d]`, `theta` `[E, K, d]` (K = P·C class weights): s `[E, b, K]`."""
        ...

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        """Two losses' gradients in s `[E, b, K]`, carried back: the first to z, the second to theta."""
        ...

    def values(self, z: Tensor, theta: Tensor) -> Tensor:
        """What `forward` gives, where no gradient is wanted."""
        return self.forward(z, theta)


class DotProduct(Similarity):
    """Bayesian logistic regression proper (equation 14): s = θ·x, one embedding, no normalisation."""

    normalised = False

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        self.z = z[:, :, 0]
        return self.z @ theta.transpose(-1, -2)

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        return None, grad_classes.transpose(-1, -2) @ self.z


class ExactKernel(Similarity):
    """The closed form, in logarithms: with short lengthscales exp would underflow.

    Both sides have unit length, so -|z - θ|²/2 is z·θ - 1. (A dead embedding, all zeros, counts as
    orthogonal to every class.)
    """

    normalised = True

    def __init__(self, lengthscale: float) -> None:
        self.precision = 1 / lengthscale**2

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        b, m = z.shape[1:3]
        self.z, self.theta = z.flatten(1, 2), theta  # E bm d, E K d
        log_k = torch.bmm(self.z, theta.transpose(-1, -2)).unflatten(1, (b, m))  # E b m K, up to the factor
        top = log_k.amax(2, keepdim=True)
        k = log_k.sub_(top).mul_(self.precision).exp_()
        total = k.sum(2, keepdim=True)
        self.share = k.div_(total)  # of particle l in the mean: E b m K
        return total.div_(m).log_().add_(top.sub_(1), alpha=self.precision)[:, :, 0]

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        shares = self.share
        to_theta = (shares * (grad_classes * self.precision)[:, :, None]).flatten(1, 2)  # E bm K
        grad_theta = torch.bmm(to_theta.transpose(-1, -2), self.z)
        if grad_embedding is None:
            return None, grad_theta
        to_z = (shares * (grad_embedding * self.precision)[:, :, None]).flatten(1, 2)
        return torch.bmm(to_z, self.theta).unflatten(1, shares.shape[1:3]), grad_theta


class FreeClassWeights(Similarity):
    """The closed form for one embedding and class weights of any length: s = -|z - θ|² / 2, up to |z|²."""

    normalised = False

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        self.z, self.theta = z[:, :, 0], theta  # E b d, E K d
        return torch.bmm(self.z, theta.transpose(-1, -2)).sub_(theta.square().sum(-1)[:, None], alpha=0.5)

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        weights = grad_classes.transpose(-1, -2)  # E K b
        return None, torch.baddbmm(-self.theta * weights.sum(-1, keepdim=True), weights, self.z)


class FourierKernel(Similarity):
    """Random features (section 3.1): the kernel is linear in the mean embedding μ(x) of a point.

    The estimate of a kernel value can come out at or below zero. Below FLOOR it is bent into the positive
    branch FLOOR · exp(k/FLOOR - 1), which meets it in value and slope.
    """

    normalised = True
    FLOOR = 0.01
    BLOCK = 128  # frequencies at a time, where no gradient is wanted: their phases stay in the cache

    def __init__(self, frequencies: Tensor) -> None:
        self.frequencies = frequencies  # R d

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        self.waves = waves(z, self.frequencies)  # 2 E b m R
        self.theta_waves = waves(theta, self.frequencies)  # 2 E K R
        self.mean = self.waves.mean(3)  # 2 E b R
        k = (self.mean @ self.theta_waves.transpose(-1, -2)).sum(0)  # E b K
        s, self.slope = self._logarithm(k.div_(len(self.frequencies)))
        return s

    def values(self, z: Tensor, theta: Tensor) -> Tensor:
        k = z.new_zeros(())
        for block in self.frequencies.split(self.BLOCK):
            mean = waves(z, block).mean(3)  # 2 E b BLOCK
            k = k + (mean @ waves(theta, block).transpose(-1, -2)).sum(0)  # E b K
        return self._logarithm(k.div_(len(self.frequencies)))[0]

    def _logarithm(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The bent log k and its slope: 1/k above the floor, 1/FLOOR below."""
        raised = k.clamp_min(self.FLOOR)
        return raised.log().add_(k - raised, alpha=1 / self.FLOOR), raised.reciprocal_()

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        slope = self.slope / len(self.frequencies)
        grad = (grad_classes * slope).transpose(-1, -2) @ self.mean  # 2 E K R
        grad_theta = waves_backward(grad, self.theta_waves, self.frequencies)
        if grad_embedding is None:
            return None, grad_theta
        grad = (grad_embedding * slope / self.waves.shape[3]) @ self.theta_waves  # 2 E b R
        return waves_backward(grad.unsqueeze(3), self.waves, self.frequencies), grad_theta


def waves(points: Tensor, frequencies: Tensor) -> Tensor:
    """cos(Vz) and sin(Vz) of points `[..., d]` under frequencies V `[R, d]`: `[2, ..., R]`."""
    phase = points @ frequencies.T
    both = phase.new_empty(2, *phase.shape)
    torch.cos(phase, out=both[0])
    torch.sin(phase, out=both[1])
    return both


def waves_backward(grad: Tensor, both: Tensor, frequencies: Tensor) -> Tensor:
    """The gradient in `waves`, of any shape that broadcasts to it, carried back to the points."""
    phase = both[0] * grad[1]
    return phase.addcmul_(both[1], grad[0], value=-1) @ frequencies


class PairedProduct(Similarity):
    """A Bayesian neural network: s_ic^l = θ_c^l·z_il, the class weights θ^l see only their own layer w_l.

    Args:
        normalised: whether s is a cosine, as in DBLR and DPKL, or a plain logit.
    """

    joint = True

    def __init__(self, normalised: bool = True) -> None:
        self.normalised = normalised

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        self.z = z.transpose(1, 2)  # E m b d
        self.theta = theta.unflatten(1, (z.shape[2], -1))  # E m C d
        return (self.z @ self.theta.transpose(-1, -2)).transpose(1, 2).flatten(2)

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        pairs = self.theta.shape[1:3]
        to_theta = grad_classes.unflatten(-1, pairs).transpose(1, 2)  # E m b C
        grad_theta = (to_theta.transpose(-1, -2) @ self.z).flatten(1, 2)
        if grad_embedding is None:
            return None, grad_theta
        grad_z = grad_embedding.unflatten(-1, pairs).transpose(1, 2) @ self.theta  # E m b d
        return grad_z.transpose(1, 2), grad_theta


def lengths(h: Tensor) -> Tensor:
    """|h| of the rows of `h` `[..., d]`, never zero: `[..., 1]`."""
    return h.norm(dim=-1, keepdim=True).clamp_min_(1e-12)


def normalise(h: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows of `h` `[..., d]` and their former lengths `[..., 1]`."""
    length = lengths(h)
    return h / length, length


def normalise_backward(grad: Tensor, z: Tensor, length: Tensor) -> Tensor:
    """The gradient in `z` = h/|h| carried back to h, in place: what points along z is lost."""
    return grad.addcmul_(z, (z * grad).sum(-1, keepdim=True), value=-1).div_(length)


def embed(inputs: Tensor, weights: Tensor | None, normalised: bool = True) -> Tensor:
    """z `[E, b, m, d]` of inputs `[E, b, r]` under particles `[E, r, m, d]` (or the inputs themselves)."""
    if weights is None:
        return inputs[:, :, None]
    hidden = torch.bmm(inputs, weights.flatten(2)).relu_().unflatten(-1, weights.shape[2:])
    return hidden.div_(lengths(hidden)) if normalised else hidden


def class_log_probabilities(z: Tensor, theta: Tensor, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of embeddings `[E, b, m, d]` under class weights `[E, P, C, d]`."""
    flat = theta.flatten(1, 2)
    s = similarity.values(z, normalise(flat)[0] if similarity.normalised else flat)
    return s.unflatten(-1, theta.shape[1:3]).log_softmax(-1)


def predictive(log_rho: Tensor) -> Tensor:
    """log mean_p ρ^p: `[E, b, P, C]` to `[E, b, C]`."""
    return log_rho.logsumexp(2) - math.log(log_rho.shape[2])


def predict(inputs: Tensor, particles: Particles, similarity: Similarity) -> Tensor:
    """log p `[E, b, C]` of inputs `[E, b, r]`."""
    return torch.cat([predictive(piece) for piece in _by_particle(inputs, particles, similarity)])


def predict_by_particle(inputs: Tensor, particles: Particles, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of inputs `[E, b, r]`: what each particle of the class weights says."""
    return torch.cat(list(_by_particle(inputs, particles, similarity)))


def _by_particle(inputs: Tensor, particles: Particles, similarity: Similarity) -> Iterator[Tensor]:
    """log ρ `[4, b, P, C]` of four episodes at a time: their features stay in cache."""
    for start in range(0, len(inputs), 4):
        piece = slice(start, start + 4)
        weights = None if particles.weights is None else particles.weights[piece]
        z = embed(inputs[piece], weights, similarity.normalised)
        yield class_log_probabilities(z, particles.theta[piece], similarity)


@dataclass
class Particles:
    """The parameters of E models: `weights` `[E, r, m, d]` (None without a layer), `theta` `[E, P, C, d]`.

    What the m layers make of one input lies side by side, so that one matrix product serves them all.
    """

    weights: Tensor | None
    theta: Tensor

    def clone(self) -> Particles:
        return Particles(None if self.weights is None else self.weights.clone(), self.theta.clone())

    def tensors(self) -> list[Tensor]:
        return [self.theta] if self.weights is None else [self.weights, self.theta]


def layer_distances(weights: Tensor) -> Tensor:
    """Squared distances between the m layers of `weights` `[E, r, m, d]`: `[E, m, m]`."""
    rows = weights.flatten(0, 1)  # Er m d
    products = torch.bmm(rows, rows.transpose(-1, -2)).unflatten(0, weights.shape[:2])
    return distances_from_products(products.sum(1))


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
    particles: Particles,
    *,
    joint: bool = False,
    prior: float,
    rule: Bandwidth = "paper",
    repulsion: float = 1.0,
    outside: Tensor | float = 0.0,
) -> Mixing:
    """κ between the particles as they are now; `joint` as in `Similarity`, the others as in `train`."""
    weights, layers = particles.weights, None
    distances = particle_distances(particles.theta.flatten(2))
    if weights is not None:
        between_layers = layer_distances(weights) + outside
        if joint:
            distances += between_layers
        else:
            layers = particle_kernel(between_layers, rule)[0]
    scores, push = svgd_mixing(distances, rule, repulsion)
    return Mixing(layers, scores, push.neg_().add_(scores, alpha=2 * prior))


def directions(
    inputs: Tensor,
    targets: Tensor,
    particles: Particles,
    similarity: Similarity,
    mixing: Mixing,
    *,
    n: int,
    prior: float,
    prior_mean: Tensor | float = 0.0,
    out: Tensor | None = None,
) -> list[Tensor]:
    """Descent directions of one minibatch, one for each of `particles.tensors()`.

    Args:
        inputs: `[E, b, r]` minibatches.
        targets: `[E, b, C]` one-hot labels.
        mixing: of κ between the particles, with the same prior.
        n: size of the support set, to which the log-likelihood of a minibatch is scaled.
        prior: the log prior of what SVGD moves is -prior·|θ|², or -prior·|θ - prior_mean|².
        prior_mean: `[E, 1, C, d]`, of the class weights.
        out: memory `[E, r, m, d]` for the direction of the layers.
    """
    weights, theta = particles.weights, particles.theta.flatten(2)  # E r m d, E P Cd
    grad_hidden, grad_theta = _gradients(inputs, targets, particles, similarity, n)
    if isinstance(prior_mean, Tensor):
        grad_theta = grad_theta + 2 * prior * prior_mean.flatten(2)
    theta_step = torch.baddbmm(torch.bmm(mixing.drift, theta), mixing.scores, grad_theta, alpha=-1)
    theta_step = theta_step.view_as(particles.theta)
    if weights is None or grad_hidden is None:
        return [theta_step]
    kappa = -mixing.scores if mixing.layers is None else mixing.layers
    mixed = kappa[:, None] @ grad_hidden  # E b m d
    # Σ_l κ_il ∇_{w_l} L with ∇_{w_l} L = Xᵀ ∂L/∂(X w_l): mixing first, then Xᵀ, is r/b times cheaper.
    step = torch.empty_like(weights) if out is None else out
    torch.bmm(inputs.transpose(-1, -2), mixed.flatten(2), out=step.flatten(2))
    if similarity.joint:
        of_rows = mixing.drift.repeat_interleave(weights.shape[1], dim=0)  # Er m m
        step.flatten(0, 1).baddbmm_(of_rows, weights.flatten(0, 1))  # in place: fresh memory would cost more
    return [step, theta_step]


def _gradients(
    inputs: Tensor, targets: Tensor, particles: Particles, similarity: Similarity, n: int
) -> tuple[Tensor | None, Tensor]:
    """Of the loss in the hidden layer x w_l `[E, b, m, d]`, of the log likelihoods in theta `[E, P, Cd]`.

    Class weights answer to each particle's own likelihood, scaled to all n points; the embedding to that of
    the mean over particles, in which particle p has the weight ρ_y^p / Σ_p' ρ_y^p'. A BNN's layer answers to
    its own network's log likelihood, as its class weights do.
    """
    b, weights, theta = inputs.shape[1], particles.weights, particles.theta
    z = length = embed(inputs, weights, normalised=False)  # E b m d
    theta_unit = theta_length = theta.flatten(1, 2)
    if similarity.normalised:
        theta_unit, theta_length = normalise(theta_unit)
        if weights is not None:
            length = lengths(z)
            z.div_(length)
    s = similarity.forward(z, theta_unit)
    s = s.unflatten(-1, theta.shape[1:3])  # E b P C
    s = s - s.amax(-1, keepdim=True)
    rho = s.exp()
    total = rho.sum(-1, keepdim=True)  # by hand: log_softmax is slow along few classes
    toward = targets[:, :, None] - rho.div_(total)  # ∂ log ρ_y / ∂s: E b P C
    own = toward.flatten(2) * (n / b)
    if weights is None:
        of_embedding = None
    elif similarity.joint:
        of_embedding = own
    else:
        right = (s * targets[:, :, None]).sum(-1, keepdim=True) - total.log_()  # log ρ_y: E b P 1
        of_embedding = (toward * right.softmax(2).div_(-b)).flatten(2)
    grad_z, grad_theta = similarity.backward(of_embedding, own)
    if similarity.normalised:
        grad_theta = normalise_backward(grad_theta, theta_unit, theta_length)
        grad_z = None if grad_z is None else normalise_backward(grad_z, z, length)
    grad_hidden = None if grad_z is None else torch.ops.aten.threshold_backward(grad_z, z, 0)  # the ReLU
    return grad_hidden, grad_theta.view_as(theta).flatten(2)


def minibatches(
    inputs: Tensor, targets: Tensor, order: Tensor, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs `[E, b, r]` and targets `[E, b, C]` of every step of an epoch, points in the order `[E, n]`."""
    episodes = torch.arange(len(order), device=order.device)[:, None]
    shuffled = inputs[episodes, order], targets[episodes, order]
    yield from zip(*(tensor.split(batch_size, dim=1) for tensor in shuffled), strict=True)


@torch.no_grad()
def train(
    inputs: Tensor,
    labels: Tensor,
    start: Particles,
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
    outside: Tensor | float = 0.0,
    kappa_every: int = 1,
    check_every: int = 10,
    optimizer: Optimizer = "adam",
    validation: tuple[Tensor, Tensor] | None = None,
    on_check: Callable[[int], None] | None = None,
) -> Particles:
    """Train E models at once and return, for each, the parameters with the least error.

    Args:
        inputs: `[E, n, r]` support points.
        labels: `[E, n]`.
        similarity: of the model; it judges the error.
        orders: `[E, epochs, n]`, the order of the points in every epoch.
        of_steps: cheaper estimates of `similarity`, one for each step in turn (default: itself).
        rule, repulsion: of κ, see `particles.svgd_mixing`.
        outside: `[E, m, m]` squared distances between the parts of the layers that do not move.
        kappa_every: steps between looks at κ.
        check_every: epochs between looks at the error (of equal errors the lower loss wins).
        validation: points `[E, v, r]` and labels `[E, v]` to judge by (default: the training points).
        on_check: called after every look with the number of epochs done.
    """
    judged, truth = validation or (inputs, labels)
    of_steps = of_steps or [similarity]
    targets = one_hot(labels, inputs.dtype)
    current = start.clone()
    tensors = current.tensors()
    optimise = make_optimizer(optimizer, tensors, learning_rate)
    memory = None if current.weights is None else torch.empty_like(current.weights)
    best = Selection(current)
    n, epochs = inputs.shape[1], orders.shape[1]
    step = 0
    for epoch in range(epochs):
        for x, y in minibatches(inputs, targets, orders[:, epoch], batch_size):
            if step % kappa_every == 0:
                mixing = look_at_kernels(
                    current,
                    joint=similarity.joint,
                    prior=prior,
                    rule=rule,
                    repulsion=repulsion,
                    outside=outside,
                )
            step += 1
            similar = of_steps[step % len(of_steps)]
            optimise(
                directions(
                    x, y, current, similar, mixing, n=n, prior=prior, prior_mean=prior_mean, out=memory
                )
            )
        if (epoch + 1) % check_every == 0 or epoch + 1 == epochs:
            best.offer(predict(judged, current, similarity), truth)
            if on_check:
                on_check(epoch + 1)
    return best.particles


def make_optimizer(
    name: Optimizer, tensors: list[Tensor], learning_rate: float
) -> Callable[[list[Tensor]], None]:
    """A function that moves the tensors by one step, given their descent directions.

    All are elementwise or linear, so that stacked episodes do not touch each other.
    """
    if name == "adam":
        # torch's own step without the bookkeeping around it, which costs as much again on small tensors
        means, squares = ([torch.zeros_like(t) for t in tensors] for _ in range(2))
        counts = [torch.zeros((), device=t.device) for t in tensors]
        return lambda moves: adam(
            tensors, moves, means, squares, [], counts, fused=True, amsgrad=False, beta1=0.9, beta2=0.999,
            lr=learning_rate, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
    if name not in ("sgd", "momentum"):
        raise ValueError(f"unknown optimizer {name!r}; use 'adam', 'sgd' or 'momentum'")
    velocities = [torch.zeros_like(t) for t in tensors]

    def descend(moves: list[Tensor]) -> None:
        for tensor, velocity, move in zip(tensors, velocities, moves, strict=True):
            velocity.mul_(0.9 if name == "momentum" else 0.0).add_(move)
            tensor.sub_(velocity, alpha=learning_rate)

    return descend


class Selection:
    """Keeps, for each episode, the parameters with the least error seen so far."""

    def __init__(self, current: Particles) -> None:
        self.current = current
        self.particles = current.clone()
        self.error = torch.full((len(current.theta),), torch.inf, device=current.theta.device)
        self.loss = self.error.clone()

    def offer(self, log_p: Tensor, labels: Tensor) -> None:
        """`log_p` `[E, n, C]` under the current parameters, `labels` `[E, n]` of the points to judge by."""
        error = (log_p.argmax(-1) != labels).float().mean(-1)
        loss = -log_p.gather(-1, labels[..., None]).mean((1, 2))
        better = (error < self.error) | ((error == self.error) & (loss < self.loss))
        self.error = torch.where(better, error, self.error)
        self.loss = torch.where(better, loss, self.loss)
        for kept, now in zip(self.particles.tensors(), self.current.tensors(), strict=True):
            kept[better] = now[better]
