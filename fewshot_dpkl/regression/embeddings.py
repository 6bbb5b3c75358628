"""What turns an input into a latent point: a network for DKL and DPKL, lengthscales for a GP.

Both are functions of a flat parameter vector, because functional gradient descent needs a distance
between particles. Parameters are `[T, m, P]` (trials, particles, parameters), inputs `[T, n, D]`, latent
points `[T, m, n, d]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

through_relu = torch.ops.aten.threshold_backward.grad_input


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

    @property
    def count(self) -> int:
        """P, the number of parameters."""
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in self.layers)

    @property
    def width(self) -> int:
        """Of the widest layer."""
        return max(self.widths)

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
        return _embed(self, parameters, inputs)

    def forward(self, parameters: Tensor, inputs: Tensor) -> list[Tensor]:
        """Every layer of B networks `[B, P]`, inputs `[B, D, n]` and latent points `[B, d, n]` included.

        The points come last: a matrix product with as few rows as the latent space has dimensions is then
        several times faster than one with as few columns.
        """
        layers = [inputs]
        for weight, bias in self._split(parameters):
            layers.append(torch.baddbmm(bias.unsqueeze(-1), weight.mT, layers[-1]))  # B out n
            if len(layers) < len(self.widths):
                layers[-1].relu_()
        return layers

    def backward(self, parameters: Tensor, layers: Sequence[Tensor], grad: Tensor) -> Tensor:
        """The gradient `[B, P]` from that of the latent points `[B, d, n]` and what `forward` returned."""
        parts: list[Tensor] = []
        for index, (weight, _) in reversed(list(enumerate(self._split(parameters)))):
            parts = [(layers[index] @ grad.mT).flatten(1), grad.sum(-1), *parts]
            if index:
                grad = weight @ grad
                through_relu(grad, layers[index], 0, grad_input=grad)  # in place: it stays in the cache
        return torch.cat(parts, -1)

    def _split(self, parameters: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights `[B, in, out]` and biases `[B, out]` of every layer."""
        sizes = [size for a, b in self.layers for size in (a * b, b)]
        parts = parameters.split(sizes, dim=-1)
        weights = [w.unflatten(-1, shape) for w, shape in zip(parts[::2], self.layers, strict=True)]
        return list(zip(weights, parts[1::2], strict=True))


@dataclass(frozen=True)
class Lengthscales:
    """x_l / h_l for each input column: the SE kernel of these points is the ARD kernel of a GP (section 4).

    The parameters are log h; they start at `start`, or at √D, which keeps the distance between two
    standardised points of the order of one in any dimension.
    """

    dimension: int
    start: float | None = None

    @property
    def count(self) -> int:
        return self.dimension

    @property
    def width(self) -> int:
        return self.dimension

    def initial(self, particles: int, generator: torch.Generator) -> Tensor:
        start = math.sqrt(self.dimension) if self.start is None else self.start
        return torch.full((particles, self.dimension), math.log(start))

    def __call__(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        return _embed(self, parameters, inputs)

    def forward(self, parameters: Tensor, inputs: Tensor) -> list[Tensor]:
        return [inputs, inputs * (-parameters).exp().unsqueeze(-1)]  # B D n

    def backward(self, parameters: Tensor, layers: Sequence[Tensor], grad: Tensor) -> Tensor:
        return -(grad * layers[-1]).sum(-1)  # B D


Embedding = Network | Lengthscales


def _embed(embedding: Embedding, parameters: Tensor, inputs: Tensor) -> Tensor:
    """Latent points `[T, m, n, d]` of inputs `[T, n, D]` under parameters `[T, m, P]`."""
    trials, particles, _ = parameters.shape
    points = inputs.mT.unsqueeze(1).expand(-1, particles, -1, -1).flatten(0, 1)  # Tm D n
    latent = _Embed.apply(embedding, parameters.flatten(0, 1), points)  # Tm d n
    return latent.unflatten(0, (trials, particles)).mT


class _Embed(torch.autograd.Function):
    """An embedding's `forward` and `backward` for autograd; inputs have no gradient."""

    @staticmethod
    def forward(ctx: Any, embedding: Embedding, parameters: Tensor, inputs: Tensor) -> Tensor:
        layers = embedding.forward(parameters, inputs)
        ctx.embedding = embedding
        ctx.save_for_backward(parameters, *layers)
        return layers[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        parameters, *layers = ctx.saved_tensors
        return None, ctx.embedding.backward(parameters, layers, grad), None
