"""How alike embeddings and class weights are: the kernels of particle classifiers, with their gradients."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

Waves = tuple[Tensor, Tensor]  # cosines and sines


class Similarity(Protocol):
    """s = log of the mean kernel between embeddings and class weights, and its two gradients."""

    normalised: bool  # whether embeddings and class weights are scaled to length one first
    bounded: bool = False  # whether exp(s) can neither overflow nor vanish
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
    """The closed form, up to a constant; with short lengthscales in logarithms, because exp would underflow.

    Both sides have unit length, so -|z - θ|²/2 is z·θ - 1. (A dead embedding, all zeros, counts as
    orthogonal to every class.)
    """

    normalised = True

    def __init__(self, lengthscale: float) -> None:
        self.precision = 1 / lengthscale**2
        self.bounded = self.precision <= 16  # k lies between exp(±16)

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        b, m = z.shape[1:3]
        self.z, self.theta = z.flatten(1, 2), theta  # E bm d, E K d
        log_k = torch.bmm(self.z, theta.transpose(-1, -2)).view(len(z), b, m, -1)  # E b m K, with ℓ = 1
        if self.precision != 1:
            log_k.mul_(self.precision)
        top = None if self.bounded else log_k.amax(2)
        self.k = (log_k if top is None else log_k.sub_(top[:, :, None])).exp_()
        total = self.k.sum(2)  # E b K
        self.slope = self.precision / total
        return total.log_() if top is None else total.log_().add_(top)

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        to_theta = (self.k * (self.slope * grad_classes)[:, :, None]).flatten(1, 2)  # E bm K
        grad_theta = torch.bmm(to_theta.transpose(-1, -2), self.z)
        if grad_embedding is None:
            return None, grad_theta
        to_z = self.k.mul_(self.slope.mul_(grad_embedding)[:, :, None])  # E b m K
        return torch.bmm(to_z.flatten(1, 2), self.theta).view(*to_z.shape[:3], -1), grad_theta


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
    bounded = True  # k lies between -1 and 1
    FLOOR = 0.01
    BLOCK = 128  # frequencies at a time, where no gradient is wanted: their phases stay in the cache

    def __init__(self, frequencies: Tensor) -> None:
        self.frequencies = frequencies  # R d
        self.columns = frequencies.T.contiguous()  # d R: a product with it is a third faster than with a view
        self._averages: Tensor | None = None

    @cached_property
    def blocks(self) -> list[FourierKernel]:
        """The kernel by parts, small enough for the cache."""
        return [FourierKernel(block) for block in self.frequencies.split(self.BLOCK)]

    def forward(self, z: Tensor, theta: Tensor) -> Tensor:
        k, self.z_waves, self.theta_waves, self.means = self._sum(z, theta)
        s, self.slope = self._logarithm(k.div_(len(self.frequencies)))
        return s

    def _sum(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Waves, Waves, Waves]:
        """Kernel values `[E, b, K]` times R; the waves of z and theta; the means over particles of z's."""
        episodes, b, m, _ = z.shape
        of_z, of_theta = self._waves(z), self._waves(theta)
        average = self._average(episodes * b, m, z)  # a product with it is three times as fast as `mean`
        cosine, sine = (torch.bmm(average, w.flatten(0, 1)).view(episodes, b, -1) for w in of_z)
        k = torch.bmm(cosine, of_theta[0].transpose(1, 2)).baddbmm_(sine, of_theta[1].transpose(1, 2))
        return k, of_z, of_theta, (cosine, sine)

    def _waves(self, points: Tensor) -> Waves:
        """cos(Vz) and sin(Vz) of points `[..., d]`: each `[..., R]`."""
        phase = torch.mm(points.flatten(0, -2), self.columns).view(*points.shape[:-1], -1)
        return phase.cos(), phase.sin_()

    def _average(self, number: int, m: int, like: Tensor) -> Tensor:
        """`[number, 1, m]` of 1/m, kept from step to step."""
        if self._averages is None or self._averages.shape != (number, 1, m):
            self._averages = like.new_full((number, 1, m), 1 / m)
        return self._averages

    def values(self, z: Tensor, theta: Tensor) -> Tensor:
        k = sum((block._sum(z, theta)[0] for block in self.blocks), z.new_zeros(()))
        return self._logarithm(k.div_(len(self.frequencies)))[0]

    def _logarithm(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The bent log k and its slope: 1/k above the floor, 1/FLOOR below."""
        raised = k.clamp_min(self.FLOOR)
        return raised.log().add_(k.sub_(raised), alpha=1 / self.FLOOR), raised.reciprocal_()

    def backward(self, grad_embedding: Tensor | None, grad_classes: Tensor) -> tuple[Tensor | None, Tensor]:
        slope = self.slope.div_(len(self.frequencies))
        to_theta = (grad_classes * slope).transpose(1, 2)  # E K b
        cosine, sine = (torch.bmm(to_theta, mean) for mean in self.means)  # E K R
        grad_theta = self._waves_backward((cosine, sine), self.theta_waves)
        if grad_embedding is None:
            return None, grad_theta
        to_z = slope.mul_(grad_embedding).div_(self.z_waves[0].shape[2])
        cosine, sine = (torch.bmm(to_z, w)[:, :, None] for w in self.theta_waves)  # E b 1 R
        return self._waves_backward((cosine, sine), self.z_waves), grad_theta

    def _waves_backward(self, grads: Waves, waves: Waves) -> Tensor:
        """The gradients in cosines and sines, which may broadcast, carried back to the points `[..., d]`."""
        phase = (waves[0] * grads[1]).addcmul_(waves[1], grads[0], value=-1)
        return torch.mm(phase.flatten(0, -2), self.frequencies).view(*phase.shape[:-1], -1)


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
