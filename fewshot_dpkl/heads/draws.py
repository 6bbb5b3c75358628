"""The random numbers of one episode."""

from __future__ import annotations

import torch
from torch import Tensor


class Draws:
    """Draws from an episode's own seed, always on the CPU so that they are the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def fill(self, tensor: Tensor, deviation: float) -> None:
        """`normal(*tensor.shape) * deviation`, written where it is wanted."""
        if tensor.dtype == torch.float32 and tensor.device.type == "cpu":
            tensor.normal_(std=deviation, generator=self.generator)
        else:
            tensor.copy_(self.normal(*tensor.shape) * deviation)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(*shape, generator=self.generator)

    def orders(self, epochs: int, n: int) -> Tensor:
        """A permutation of n points for every epoch: `[epochs, n]`."""
        return self.uniform(epochs, n).argsort(-1)
