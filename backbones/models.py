"""Backbones by name: build an untrained one, or load a trained one as a frozen extractor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from .conv import conv4, conv4_signed, conv6
from .resnet import resnet10, resnet12, resnet18

ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "conv4": conv4,
    "conv4-signed": conv4_signed,
    "conv6": conv6,
    "resnet10": resnet10,
    "resnet12": resnet12,
    "resnet18": resnet18,
}


def build(architecture: str, seed: int = 0) -> nn.Module:
    """An untrained backbone whose weights follow from `seed`."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ARCHITECTURES[architecture]()


def centre_crop(pixels: np.ndarray, size: int) -> np.ndarray:
    """The middle `size` × `size` of square pictures `[N, H, H, 3]`."""
    margin = pixels.shape[1] - size
    if margin < 0:
        raise ValueError(f"pictures have {pixels.shape[1]} pixels, but the backbone wants {size}")
    begin = margin // 2
    return pixels[:, begin : begin + size, begin : begin + size]
