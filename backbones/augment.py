"""Random crops, flips and colours for a whole batch at once (the augmentation of Chen et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def normalise(images: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """uint8 pictures `[B, H, W, 3]` to float `[B, 3, H, W]`, channels-last: (value / 255 - mean) / std."""
    shift = torch.tensor(mean, device=images.device) * 255
    scale = torch.tensor(std, device=images.device) * 255
    return ((images.float() - shift) / scale).permute(0, 3, 1, 2)


def random_crops(
    images: Tensor, size: int, area: tuple[float, float], generator: torch.Generator | None = None
) -> Tensor:
    """Crop a random box of each picture, mirror half of them, resample all to `size` × `size`.

    The box covers a share `area` of the picture, its aspect ratio is between 3/4 and 4/3.
    `[B, 3, H, W]` to `[B, 3, size, size]`.
    """
    count = len(images)
    draw = torch.rand(5, count, generator=generator)
    share = area[0] + (area[1] - area[0]) * draw[0]
    aspect = torch.exp(math.log(4 / 3) * (2 * draw[1] - 1))
    width = (share * aspect).sqrt().clamp_max(1.0)
    height = (share / aspect).sqrt().clamp_max(1.0)
    mirror = torch.where(draw[2] < 0.5, -1.0, 1.0)
    boxes = torch.zeros(count, 2, 3)
    boxes[:, 0, 0] = width * mirror
    boxes[:, 0, 2] = (1 - width) * (2 * draw[3] - 1)
    boxes[:, 1, 1] = height
    boxes[:, 1, 2] = (1 - height) * (2 * draw[4] - 1)
    grid = F.affine_grid(boxes.to(images.device), [count, 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def jitter_colours(images: Tensor, strength: float, generator: torch.Generator | None = None) -> Tensor:
    """Random brightness, contrast and saturation, each by a factor within 1 ± `strength`.

    `images` `[B, 3, H, W]` with values in 0 … 255.
    """
    factors = 1 + strength * (2 * torch.rand(3, len(images), 1, 1, 1, generator=generator) - 1)
    brightness, contrast, saturation = factors.to(images.device)
    weights = torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
    images = images * brightness
    grey = (images * weights).sum(1, keepdim=True)  # B 1 H W
    average = grey.mean((2, 3), keepdim=True)  # B 1 1 1
    # saturation mixes with the grey picture, contrast with its average
    images = average + contrast * (grey + saturation * (images - grey) - average)
    return images.clamp_(0, 255)


def augment(
    images: Tensor,
    size: int,
    area: tuple[float, float],
    jitter: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """uint8 pictures `[B, H, W, 3]` to normalised random views `[B, 3, size, size]`, channels-last."""
    views = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    views = random_crops(views, size, area, generator)
    if jitter > 0:
        views = jitter_colours(views, jitter, generator)
    return normalise(views.permute(0, 2, 3, 1)).contiguous(memory_format=torch.channels_last)
