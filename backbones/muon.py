"""Muon: momentum whose steps have all their singular values near one (Jordan et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """U Vᵀ of the singular value decompositions U S Vᵀ of `matrices` `[k, rows, columns]`, rows ≤ columns.

    Only roughly: a polynomial that is steep at zero, applied `steps` times, brings all but the smallest
    singular values to between 0.7 and 1.2, by matrix products alone.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    for _ in range(steps):
        gram = x @ x.mT  # k rows rows
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def fits_muon(parameter: Tensor) -> bool:
    """Whether these are filters `[out, in, height, width]` that can be orthogonal to each other."""
    return parameter.ndim == 4 and parameter.shape[0] <= parameter[0].numel()


class Muon(torch.optim.Optimizer):
    """Steps of one length in every direction that the filters `[out, in, height, width]` can take.

    For filters in front of a batch normalisation, which undoes their length: they are kept at
    √out, the length of orthonormal ones, so that `lr` is how far a step turns them.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for alike in by_shape.values():  # in one go: single filters are small
                self._move(alike, group["lr"], group["momentum"])

    def _move(self, filters: list[Tensor], lr: float, momentum: float) -> None:
        looks = []
        for parameter in filters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state["velocity"] = torch.zeros_like(parameter)
            velocity = state["velocity"].mul_(momentum).add_(parameter.grad)
            looks.append(parameter.grad.add(velocity, alpha=momentum).flatten(1))  # Nesterov: out in·h·w
        for parameter, turn in zip(filters, orthogonalise(torch.stack(looks)), strict=True):
            parameter.mul_(len(parameter) ** 0.5 / parameter.norm().clamp_min(1e-12))
            parameter.sub_(turn.view(parameter.shape), alpha=lr)
