"""ResNet-10, -12 and -18 in the forms of the few-shot literature."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """`depth` 3×3 convolutions with batch normalisation and a shortcut; halves the map if `stride` is 2.

    With `pool` the block halves the map by 2×2 max-pooling at its end instead (ResNet-12).
    """

    def __init__(
        self, channels_in: int, channels: int, depth: int, stride: int = 1, pool: bool = False
    ) -> None:
        super().__init__()
        sizes = [channels_in] + [channels] * depth
        steps = [stride] + [1] * (depth - 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], 3, steps[i], padding=1, bias=False) for i in range(depth)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(depth))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))
        self.slope = 0.1 if pool else 0.0
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """`[B, channels_in, H, W]` to `[B, channels, H', W']`."""
        shortcut = self.shortcut(x)
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            if index < len(self.convs) - 1:
                x = F.leaky_relu(x, self.slope)
        x = F.leaky_relu(x + shortcut, self.slope)
        return F.max_pool2d(x, 2) if self.pool else x


class ResNet(nn.Module):
    """A stem, residual blocks, and the average over the map: `[B, 3, H, W]` to `[B, channels]`."""

    def __init__(self, stem: nn.Module, blocks: list[ResidualBlock]) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def feature_map(self, images: Tensor) -> Tensor:
        """`[B, 3, H, W]` to `[B, channels, 1, 1]`: the averaged map, which does not depend on the size."""
        return F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1)

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 3, H, W]` to features `[B, channels]`."""
        return self.feature_map(images).flatten(1)


def _imagenet_stem() -> nn.Module:
    """7×7 convolution with stride 2, batch normalisation, ReLU, 3×3 max-pooling with stride 2."""
    conv = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _two_layer_blocks(repeats: int) -> list[ResidualBlock]:
    blocks, channels_in = [], 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        for index in range(repeats):
            blocks.append(
                ResidualBlock(channels_in, channels, depth=2, stride=2 if stage and not index else 1)
            )
            channels_in = channels
    return blocks


def resnet10() -> ResNet:
    """One two-layer block per stage (Chen et al. 2019): 512 features."""
    return ResNet(_imagenet_stem(), _two_layer_blocks(1))


def resnet18() -> ResNet:
    """Two two-layer blocks per stage (He et al. 2016): 512 features."""
    return ResNet(_imagenet_stem(), _two_layer_blocks(2))


def resnet12() -> ResNet:
    """Four three-layer blocks of 64 to 640 channels, each pooled (Lee et al. 2019): 640 features."""
    channels = (3, 64, 160, 320, 640)
    return ResNet(
        nn.Identity(), [ResidualBlock(channels[i], channels[i + 1], 3, pool=True) for i in range(4)]
    )
