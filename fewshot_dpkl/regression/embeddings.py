"""What turns an input into a latent point: a network for DKL and DPKL, lengthscales for a GP.

Both are functions of a flat parameter vector, because functional gradient descent needs a distance
between particles. Parameters are `[T, m, P]` (trials, particles, parameters), inputs `[T, n, D]`, latent
points `[T, m, n, d]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Network:
    """A fully connected network with ReLU between its layers, e.g. D-100-50-50-2 (section 4).

    The paper does not say how the weights start; here uniform after Glorot & Bengio (2010) with zero
    biases, which reproduces the reference figures.
    """

    widths: Sequence[int]  # D, hidden sizes, d

    @property
    def layers(self) -> list[tuple[int, int]]:
        return list(zip(self.widths[:-1], self.widths[1:], strict=True))

    def initial(self, particles: int, generator: torch.Generator) -> Tensor:
        """Starting parameters `[m, P]`, drawn particle by particle: the first is the same for every m."""
        rows = []
        for _ in range(particles):
            parts = []
            for fan_in, fan_out in self.layers:
                bound = math.sqrt(6 / (fan_in + fan_out))
                parts += [(2 * torch.rand(fan_in * fan_out, generator=generator) - 1) * bound]
                parts += [torch.zeros(fan_out)]
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def __call__(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        trials, particles, _ = parameters.shape
        sizes = [size for a, b in self.layers for size in (a * b, b)]
        parts = parameters.flatten(0, 1).split(sizes, dim=-1)
        h = inputs.unsqueeze(1).expand(-1, particles, -1, -1).flatten(0, 1)  # Tm n D
        for index, (fan_in, fan_out) in enumerate(self.layers):
            weight = parts[2 * index].unflatten(-1, (fan_in, fan_out))  # Tm in out
            h = torch.baddbmm(parts[2 * index + 1].unsqueeze(1), h, weight)  # Tm n out
            if index < len(self.layers) - 1:
                h = h.relu_()
        return h.unflatten(0, (trials, particles))  # T m n d


@dataclass(frozen=True)
class Lengthscales:
    """x_l / h_l for each input column: the SE kernel of these points is the ARD kernel of a GP (section 4).

    The parameters are log h; they start at `start`, or at √D, which keeps the distance between two
    standardised points of the order of one in any dimension.
    """

    dimension: int
    start: float | None = None

    def initial(self, particles: int, generator: torch.Generator) -> Tensor:
        start = math.sqrt(self.dimension) if self.start is None else self.start
        return torch.full((particles, self.dimension), math.log(start))

    def __call__(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(1) * (-parameters).exp().unsqueeze(2)  # T m n D


Embedding = Network | Lengthscales
