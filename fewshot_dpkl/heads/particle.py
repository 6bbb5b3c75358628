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

from fewshot_dpkl.heads.base import one_hot
from fewshot_dpkl.particles import Bandwidth, particle_distances, particle_kernel, svgd_direction, svgd_mixing

Optimizer = Literal["adam", "sgd", "momentum"]


class Similarity(Protocol):
    """s = log of the mean kernel between embeddings and class weights, and its two gradients."""

    normalised: bool  # whether embeddings and class weights are scaled to length one first
    joint: bool = False  # whether w_l and θ^l are one particle, moved by SVGD as a whole

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        """`z` `[E, m, b, d]`, `theta` `[E, K, d]` (K = P·C class weights): s `[E, b, K]`."""
        ...

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        """Two losses' gradients in s `[E, b, K]`, carried back: the first to z, the second to theta."""
        ...


class DotProduct(Similarity):
    """Bayesian logistic regression proper (equation 14): s = θ·x, one embedding, no normalisation."""

    normalised = False

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        self.z = z[:, 0]
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
        m, b = z.shape[1:3]
        self.z, self.theta = z.flatten(1, 2), theta  # E mb d, E K d
        log_k = (
            (self.z @ theta.transpose(-1, -2)).sub_(1).mul_(self.precision).unflatten(1, (m, b))
        )  # E m b K
        top = log_k.amax(1, keepdim=True)
        k = log_k.sub_(top).exp_()
        total = k.sum(1, keepdim=True)
        self.share = k.div_(total)  # of particle l in the mean: E m b K
        return total.div_(m).log_().add_(top)[:, 0]

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        shares = self.share
        to_theta = (shares * (grad_classes * self.precision)[:, None]).flatten(1, 2)  # E mb K
        grad_theta = to_theta.transpose(-1, -2) @ self.z
        if grad_embedding is None:
            return None, grad_theta
        to_z = (shares * (grad_embedding * self.precision)[:, None]).flatten(1, 2)
        return (to_z @ self.theta).unflatten(1, shares.shape[1:3]), grad_theta


class FourierKernel(Similarity):
    """Random features (section 3.1): the kernel is linear in the mean embedding μ(x) of a point.

    The estimate of a kernel value can come out at or below zero. Below FLOOR it is bent into the positive
    branch FLOOR · exp(k/FLOOR - 1), which meets it in value and slope.
    """

    normalised = True
    FLOOR = 0.01

    def __init__(self, frequencies: Tensor) -> None:
        self.frequencies = frequencies  # R d

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        r = len(self.frequencies)
        phase = z @ self.frequencies.T  # E m b R
        self.cos, self.sin = phase.cos(), phase.sin_()
        self.mean = torch.cat([self.cos.mean(1), self.sin.mean(1)], -1)  # E b 2R
        phase = theta @ self.frequencies.T  # E K R
        self.theta = torch.cat([phase.cos(), phase.sin_()], -1)  # E K 2R
        k = self.mean @ self.theta.transpose(-1, -2) / r  # E b K
        raised = k.clamp_min(self.FLOOR)
        self.slope = 1 / (raised * r)  # ∂s/∂k / R: 1/k above the floor, 1/FLOOR below
        return torch.where(k > self.FLOOR, raised.log(), k / self.FLOOR - 1 + math.log(self.FLOOR))

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        r, m = len(self.frequencies), self.cos.shape[1]
        grad = (grad_classes * self.slope).transpose(-1, -2) @ self.mean  # E K 2R
        phase = self.theta[..., :r] * grad[..., r:] - self.theta[..., r:] * grad[..., :r]
        grad_theta = phase @ self.frequencies
        if grad_embedding is None:
            return None, grad_theta
        grad = (grad_embedding * self.slope / m) @ self.theta  # E b 2R
        phase = self.cos * grad[:, None, :, r:] - self.sin * grad[:, None, :, :r]  # E m b R
        return phase @ self.frequencies, grad_theta


class PairedProduct(Similarity):
    """A Bayesian neural network: s_ic^l = θ_c^l·z_il, the class weights θ^l see only their own layer w_l.

    Args:
        normalised: whether s is a cosine, as in DBLR and DPKL, or a plain logit.
    """

    joint = True

    def __init__(self, normalised: bool = True) -> None:
        self.normalised = normalised

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        self.z, self.theta = z, theta.unflatten(1, (z.shape[1], -1))  # E m b d, E m C d
        return (z @ self.theta.transpose(-1, -2)).transpose(1, 2).flatten(2)

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        pairs = self.theta.shape[1:3]
        to_theta = grad_classes.unflatten(-1, pairs).transpose(1, 2)  # E m b C
        grad_theta = (to_theta.transpose(-1, -2) @ self.z).flatten(1, 2)
        if grad_embedding is None:
            return None, grad_theta
        return grad_embedding.unflatten(-1, pairs).transpose(1, 2) @ self.theta, grad_theta


def normalise(h: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows of `h` `[..., d]` and their former lengths `[..., 1]`."""
    length = h.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return h / length, length


def normalise_backward(grad: Tensor, z: Tensor, length: Tensor) -> Tensor:
    """The gradient in `z` = h/|h| carried back to h, in place: what points along z is lost."""
    return grad.addcmul_(z, (z * grad).sum(-1, keepdim=True), value=-1).div_(length)


def embed(inputs: Tensor, weights: Tensor | None, normalised: bool = True) -> Tensor:
    """z `[E, m, b, d]` of inputs `[E, b, D]` under particles `[E, m, D, d]` (or the inputs themselves)."""
    if weights is None:
        return inputs[:, None]
    hidden = (inputs[:, None] @ weights).relu_()
    return normalise(hidden)[0] if normalised else hidden


def class_log_probabilities(z: Tensor, theta: Tensor, similarity: Similarity) -> Tensor:
    """log ρ `[E, b, P, C]` of embeddings `[E, m, b, d]` under class weights `[E, P, C, d]`."""
    flat = theta.flatten(1, 2)
    s = similarity.forward(z, normalise(flat)[0] if similarity.normalised else flat)
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
    """The parameters of E models: `weights` `[E, m, r, d]` (None without a layer), `theta` `[E, P, C, d]`."""

    weights: Tensor | None
    theta: Tensor

    def clone(self) -> Particles:
        return Particles(None if self.weights is None else self.weights.clone(), self.theta.clone())

    def tensors(self) -> list[Tensor]:
        return [self.theta] if self.weights is None else [self.weights, self.theta]


def directions(
    inputs: Tensor,
    targets: Tensor,
    particles: Particles,
    similarity: Similarity,
    *,
    n: int,
    prior: float,
    rule: Bandwidth = "paper",
    repulsion: float = 1.0,
    outside: Tensor | float = 0.0,
    out: Tensor | None = None,
) -> list[Tensor]:
    """Descent directions of one minibatch, one for each of `particles.tensors()`.

    Args:
        inputs: `[E, b, r]` minibatches.
        targets: `[E, b, C]` one-hot labels.
        n: size of the support set, to which the log-likelihood of a minibatch is scaled.
        prior: the log prior of what SVGD moves is -prior·|θ|².
        repulsion: of SVGD, see `particles.svgd_mixing`.
        outside: `[E, m, m]` squared distances between the parts of the particles that do not move.
        out: memory for the first direction.
    """
    weights, theta = particles.weights, particles.theta.flatten(2)  # E m r d, E P Cd
    grad_hidden, grad_theta = _gradients(inputs, targets, particles, similarity, n)
    if weights is None or grad_hidden is None:
        score = grad_theta - 2 * prior * theta
        return [svgd_direction(theta, score, rule, repulsion).view_as(particles.theta).neg_()]
    distances = particle_distances(weights.flatten(2)) + outside
    if similarity.joint:
        mix, push = svgd_mixing(distances + particle_distances(theta), rule, repulsion)
        drift = 2 * prior * mix - push  # what prior and repulsion make of the particles, to descend along
        theta_step = drift @ theta - mix @ grad_theta
        weights_step = _to_weights(inputs, -mix @ grad_hidden.flatten(2), weights, out)
        weights_step.flatten(2).baddbmm_(drift, weights.flatten(2))
    else:
        score = grad_theta - 2 * prior * theta
        theta_step = svgd_direction(theta, score, rule, repulsion).neg_()
        kappa, _ = particle_kernel(distances, rule)
        weights_step = _to_weights(inputs, kappa @ grad_hidden.flatten(2), weights, out)
    return [weights_step, theta_step.view_as(particles.theta)]


def _gradients(
    inputs: Tensor, targets: Tensor, particles: Particles, similarity: Similarity, n: int
) -> tuple[Tensor | None, Tensor]:
    """Of the loss in the hidden layer x w_l `[E, m, b, d]`, of the log likelihoods in theta `[E, P, Cd]`.

    Class weights answer to each particle's own likelihood, scaled to all n points; the embedding to that of
    the mean over particles, in which particle p has the weight ρ_y^p / Σ_p' ρ_y^p'. A BNN's layer answers to
    its own network's log likelihood, as its class weights do.
    """
    b, weights, theta = inputs.shape[1], particles.weights, particles.theta
    if weights is None:
        z, length = inputs[:, None], inputs
    else:
        z = (inputs[:, None] @ weights).relu_()  # E m b d
        z, length = normalise(z) if similarity.normalised else (z, z)
    log_rho, theta_unit, theta_length = _forward(z, theta, similarity)
    toward = targets[:, :, None] - log_rho.exp()  # ∂ log ρ_y / ∂s: E b P C
    own = toward.flatten(2) * (n / b)
    if weights is None:
        of_embedding = None
    elif similarity.joint:
        of_embedding = own
    else:
        right = (log_rho * targets[:, :, None]).sum(-1, keepdim=True)  # log ρ_y: E b P 1
        of_embedding = (toward * right.softmax(2) / -b).flatten(2)
    grad_z, grad_theta = similarity.backward(of_embedding, own)
    if similarity.normalised:
        grad_theta = normalise_backward(grad_theta, theta_unit, theta_length)
        grad_z = None if grad_z is None else normalise_backward(grad_z, z, length)
    grad_hidden = None if grad_z is None else grad_z.mul_(z.sign())  # through the ReLU
    return grad_hidden, grad_theta.view_as(theta).flatten(2)


def _to_weights(inputs: Tensor, mixed: Tensor, weights: Tensor, out: Tensor | None) -> Tensor:
    """Xᵀ times the mixed gradients of the hidden layer `[E, m, bd]`: `[E, m, r, d]`.

    Σ_l κ_il ∇_{w_l} L with ∇_{w_l} L = Xᵀ ∂L/∂(X w_l): mixing first, then Xᵀ, is r/b times cheaper.
    """
    m, d = weights.shape[1], weights.shape[3]
    transposed = inputs.transpose(-1, -2)[:, None].expand(-1, m, -1, -1)  # E m r b
    step = torch.bmm(
        transposed.flatten(0, 1),
        mixed.view(-1, inputs.shape[1], d),
        out=None if out is None else out.flatten(0, 1),
    )
    return step.view_as(weights)


def _forward(z: Tensor, theta: Tensor, similarity: Similarity) -> tuple[Tensor, Tensor, Tensor]:
    flat = theta.flatten(1, 2)
    unit, length = normalise(flat) if similarity.normalised else (flat, flat)
    s = similarity.forward(z, unit)
    return s.unflatten(-1, theta.shape[1:3]).log_softmax(-1), unit, length


def minibatches(orders: Tensor, batch_size: int) -> Iterator[tuple[int, Tensor]]:
    """(epoch, `[E, b]` indices) of every step, from orders `[E, epochs, n]`."""
    for epoch in range(orders.shape[1]):
        for indices in orders[:, epoch].split(batch_size, dim=1):
            yield epoch, indices


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
    rule: Bandwidth = "paper",
    repulsion: float = 1.0,
    outside: Tensor | float = 0.0,
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
        check_every: epochs between looks at the error (of equal errors the lower loss wins).
        validation: points `[E, v, r]` and labels `[E, v]` to judge by (default: the training points).
        on_check: called after every look with the number of epochs done.
    """
    judged, truth = validation or (inputs, labels)
    of_steps = of_steps or [similarity]
    targets = one_hot(labels, inputs.dtype)
    current = start.clone()
    optimise = make_optimizer(optimizer, current.tensors(), learning_rate)
    best = Selection(current)
    episodes = torch.arange(len(inputs), device=inputs.device)[:, None]
    n, epochs = inputs.shape[1], orders.shape[1]
    steps_per_epoch = -(-n // batch_size)
    for step, (epoch, indices) in enumerate(minibatches(orders, batch_size), start=1):
        moves = directions(
            inputs[episodes, indices], targets[episodes, indices], current, of_steps[step % len(of_steps)],
            n=n, prior=prior, rule=rule, repulsion=repulsion, outside=outside,
            out=None if current.weights is None else current.weights.grad,
        )  # fmt: skip
        for parameter, move in zip(current.tensors(), moves, strict=True):
            parameter.grad = move
        optimise.step()
        if step % steps_per_epoch == 0 and ((epoch + 1) % check_every == 0 or epoch + 1 == epochs):
            best.offer(predict(judged, current, similarity), truth)
            if on_check:
                on_check(epoch + 1)
    return best.particles


def make_optimizer(name: Optimizer, tensors: list[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """All are elementwise or linear, so that stacked episodes do not touch each other."""
    if name == "adam":
        return torch.optim.Adam(tensors, lr=learning_rate, fused=True)
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(tensors, lr=learning_rate, momentum=0.9 if name == "momentum" else 0.0)
    raise ValueError(f"unknown optimizer {name!r}; use 'adam', 'sgd' or 'momentum'")


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
