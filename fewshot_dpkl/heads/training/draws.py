"""The random numbers of one episode, and the layers that training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fewshot_dpkl.heads.training import native
from fewshot_dpkl.kernels import hadamard_matrix


class Draws:
    """Draws from an episode's own seed, always on the CPU so that they are the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.seed = seed

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(*shape, generator=self.generator)

    def orders(self, epochs: int, n: int) -> Tensor:
        """A permutation of n points for every epoch: `[epochs, n]`."""
        return self.uniform(epochs, n).argsort(-1)

    def stream(self) -> Tensor:
        """The state `[4]` of a stream of bits of its own, numpy's SFC64: the seed of millions of weights."""
        state = np.random.SFC64(self.seed).state["state"]["state"]
        return torch.from_numpy(state.view(np.int64).copy())


def uniform_weights(stream: Tensor, shape: Sequence[int], deviation: float) -> Tensor:
    """Uniform around zero with this standard deviation, in 2¹⁵ even steps, from the stream of `Draws`.

    For millions of initial weights: 16 raw bits each take a fifth of the time of a normal number.
    """
    count = int(np.prod(shape))
    bits = _raw_bits(stream, 16 * count).view(np.int16)[:count]
    bits |= 1  # odd numbers from -32767 to 32767: as many below zero as above
    return torch.from_numpy(bits.astype(np.float32)).view(*shape).mul_(deviation * 3**0.5 / 2**15)


def sign_weights(stream: Tensor, shape: tuple[int, int, int], deviation: float) -> Tensor:
    """m layers `[D, m, d]` of ±`deviation`: Hadamard's matrix again and again, every row with a random sign.

    A unit is a vector of random signs, and the d units of a layer are orthogonal to each other (where d
    divides D). What such a layer makes of a point are D + d log d additions (Ailon & Chazelle, 2006).
    """
    features, m, d = shape
    bits = np.unpackbits(_raw_bits(stream, m * features).view(np.uint8), bitorder="little")[: m * features]
    signs = torch.from_numpy(1 - 2 * bits.astype(np.float32)).view(m, features).T  # D m
    return hadamard_matrix(d)[torch.arange(features) % d][:, None] * (deviation * signs)[..., None]


def _raw_bits(stream: Tensor, count: int) -> np.ndarray:
    """At least so many bits, in words of 64."""
    bits = np.random.SFC64(0)
    state = bits.state
    state["state"]["state"] = stream.numpy().view(np.uint64)
    bits.state = state
    return bits.random_raw(-(-count // 64))


@dataclass
class Start:
    """Random layers `[E, D, m, d]`, as they stand or as the streams that they are drawn from.

    An episode's layers are megabytes, and its stream four numbers: they are drawn again where needed, by
    `sign_weights` if `signs`, else by `uniform_weights`.
    """

    shape: tuple[int, int, int]  # D, m, d
    deviation: float
    streams: Tensor | None = None  # E 4
    given: Tensor | None = None  # E D m d
    signs: bool = False

    def weights(self, like: Tensor) -> Tensor:
        """All of them, of the type and on the device of `like`."""
        if self.given is not None:
            return self.given.to(like)
        assert self.streams is not None
        draw = sign_weights if self.signs else uniform_weights
        return torch.stack([draw(stream, self.shape, self.deviation) for stream in self.streams]).to(like)

    def through(self, points: Tensor, products: bool = False) -> tuple[Tensor, Tensor]:
        """What they make of points `[E, b, D]`: `[E, b, m, d]`; their products `[E, m, m]`, if wanted."""
        if self.signs and self.streams is not None and native.can_rotate(self.shape[2], points):
            return native.through_signs(self.streams, points, self.shape, self.deviation, products)
        hidden, of_layers = [], []
        for e, some in enumerate(points):  # one at a time: each is megabytes
            stream, given = (None if part is None else part[e : e + 1] for part in (self.streams, self.given))
            weights = Start(self.shape, self.deviation, stream, given, self.signs).weights(points)[0]
            hidden.append((some @ weights.flatten(1)).unflatten(-1, self.shape[1:]))
            by_layer = weights.transpose(0, 1).flatten(1)
            of_layers.append(by_layer @ by_layer.T if products else points.new_empty(0))
        return torch.stack(hidden), torch.stack(of_layers)
