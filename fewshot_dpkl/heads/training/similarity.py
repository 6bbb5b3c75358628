"""How alike embeddings and class weights are: the kernels of particle classifiers."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

LANES = 16  # of the vector registers that `native.py` fills


class Similarity(Protocol):
    """s = log of the mean kernel between embeddings and class weights, up to what all classes share."""

    normalised: bool  # whether embeddings and class weights are scaled to length one first
    joint: bool = False  # whether w_l and θ^l are one particle, moved by SVGD as a whole

    def __call__(self, z: Tensor, theta: Tensor) -> Tensor:
        """`z` `[E, b, m, d]`, `theta` `[E, K, d]` (K = P·C class weights): s `[E, b, K]`."""
        ...

    def of_step(self, step: int) -> Similarity:
        """What a training step looks at, which may be a part of the whole."""
        return self


class DotProduct(Similarity):
    """Bayesian logistic regression proper (equation 14): s = θ·x, one embedding, no normalisation."""

    normalised = False

    def __call__(self, z: Tensor, theta: Tensor) -> Tensor:
        return z[:, :, 0] @ theta.transpose(-1, -2)


class ExactKernel(Similarity):
    """The closed form, in logarithms: with short lengthscales exp would underflow.

    Both sides have unit length, so -|z - θ|²/2 is z·θ - 1. (A dead embedding, all zeros, counts as
    orthogonal to every class.)
    """

    normalised = True

    def __init__(self, lengthscale: float) -> None:
        self.precision = 1 / lengthscale**2

    def __call__(self, z: Tensor, theta: Tensor) -> Tensor:
        products = z.flatten(1, 2) @ theta.transpose(-1, -2)  # E bm K
        return (self.precision * products).unflatten(1, z.shape[1:3]).logsumexp(2)


class FourierKernel(Similarity):
    """Random features (section 3.1): the kernel is linear in the mean embedding μ(x) of a point.

    The estimate of a kernel value can come out at or below zero. Below FLOOR it is bent into the positive
    branch FLOOR · exp(k/FLOOR - 1), which meets it in value and slope.

    Args:
        frequencies: `[R, d]`.
        per_step: how many of them a training step looks at, the next step at the next (default: all).
        scales: `[R / d, 4, d]` that the frequencies are made of (`kernels.hadamard_scales`), if they are.
    """

    normalised = True
    FLOOR = 0.01

    def __init__(
        self, frequencies: Tensor, per_step: int | None = None, scales: Tensor | None = None
    ) -> None:
        self.frequencies, self.scales = frequencies, scales
        self.per_step = min(per_step or len(frequencies), len(frequencies))

    @cached_property
    def blocks(self) -> list[FourierKernel]:
        return [FourierKernel(block) for block in self.frequencies.split(self.per_step)]

    def of_step(self, step: int) -> FourierKernel:
        return self.blocks[step % len(self.blocks)]

    @cached_property
    def packed(self) -> tuple[Tensor, Tensor]:
        """Rows `[blocks, r, d]` and columns `[blocks, d, r]` of the blocks, zeros behind r and d."""
        rows, d = self.frequencies.split(self.per_step), self.frequencies.shape[1]
        packed = self.frequencies.new_zeros(len(rows), self.per_step + -self.per_step % LANES, d + -d % LANES)
        for block, frequencies in zip(packed, rows, strict=True):
            block[: len(frequencies), :d] = frequencies
        return packed, packed.transpose(1, 2).contiguous()

    def __call__(self, z: Tensor, theta: Tensor) -> Tensor:
        k = z.new_zeros(())
        for some in self.frequencies.split(128):  # their waves are many times the points
            of_z, of_theta = z @ some.T, theta @ some.T  # E b m R, E K R
            for wave in (torch.cos, torch.sin):
                k = k + wave(of_z).mean(2) @ wave(of_theta).transpose(-1, -2)
        k = k / len(self.frequencies)
        raised = k.clamp_min(self.FLOOR)
        return raised.log() + (k - raised) / self.FLOOR


class PairedProduct(Similarity):
    """A Bayesian neural network: s_ic^l = θ_c^l·z_il, the class weights θ^l see only their own layer w_l.

    Args:
        normalised: whether s is a cosine, as in DBLR and DPKL, or a plain logit.
    """

    joint = True

    def __init__(self, normalised: bool = True) -> None:
        self.normalised = normalised

    def __call__(self, z: Tensor, theta: Tensor) -> Tensor:
        own = theta.unflatten(1, (z.shape[2], -1))  # E m C d
        return (z.transpose(1, 2) @ own.transpose(-1, -2)).transpose(1, 2).flatten(2)
