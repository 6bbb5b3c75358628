"""Conv-4 and Conv-6, the small backbones of the few-shot literature (Vinyals et al. 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .fused import norm_pool


class ConvBlock(nn.Module):
    """3×3 convolution, batch normalisation, ReLU (if `relu`) and 2×2 max-pooling (if `pool`).

    The maximum is taken before the ReLU, which gives the same result on a quarter of the values. The
    convolution has no bias: batch normalisation would subtract it again.
    """

    def __init__(self, channels_in: int, channels_out: int, pool: bool = True, relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        self.pool, self.relu = pool, relu
        self.frozen = False  # set where other blocks go on learning: no gradient is wanted of this one

    def forward(self, x: Tensor) -> Tensor:
        """`[B, channels_in, H, W]` to `[B, channels_out, H // 2, W // 2]` (`H, W` without pooling)."""
        if self.pool and self.training and x.device.type == "cpu" and x.dtype == torch.float32:
            return self._train_on_cpu(x)
        x = self._folded(x) if self.frozen else self.norm(self.conv(x))
        if self.pool:
            x = F.max_pool2d(x, 2)
        return F.relu(x) if self.relu else x

    def _train_on_cpu(self, x: Tensor) -> Tensor:
        # The fused step wants γ ≥ 0: the sign of γ moves into the filters, which changes nothing else.
        gamma = self.norm.weight
        sign = torch.where(gamma.detach() < 0, -1.0, 1.0)
        z = F.conv2d(x, self.conv.weight * sign.view(-1, 1, 1, 1), padding=1)
        z = z.contiguous(memory_format=torch.channels_last)
        out, mean, var = norm_pool(z, gamma * sign, self.norm.bias, self.norm.eps, self.relu)
        count = z.numel() // z.shape[1]
        self._track(mean * sign, var * (count / max(count - 1, 1)))
        return out

    @torch.no_grad()
    def _folded(self, x: Tensor) -> Tensor:
        """Convolution and normalisation in one pass."""
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        weight, bias = fuse_conv_bn_weights(
            self.conv.weight, None, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        return F.conv2d(x, weight, bias, padding=1)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        """What `nn.BatchNorm2d` does with the moments of a batch."""
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        assert norm.momentum is not None
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(unbiased_var, norm.momentum)
        norm.num_batches_tracked += 1


class ConvNet(nn.Module):
    """`depth` blocks of `width` channels, the first four of them pooled; the output map is flattened.

    Conv-4 turns 84×84 pictures into 64·5·5 = 1600 features; any input of at least 16×16 works. With
    `signed` the last block has no ReLU: a cosine then tells apart what a feature is *not*, too (Gidaris &
    Komodakis, 2018).
    """

    def __init__(self, depth: int = 4, width: int = 64, signed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ConvBlock(
                3 if index == 0 else width, width, pool=index < 4, relu=not (signed and index == depth - 1)
            )
            for index in range(depth)
        )

    def feature_map(self, images: Tensor) -> Tensor:
        """`[B, 3, H, W]` to `[B, width, H // 16, W // 16]`."""
        x = images
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: Tensor) -> Tensor:
        """`[B, 3, H, W]` to features `[B, width · (H // 16) · (W // 16)]`."""
        return self.feature_map(images).flatten(1)


def conv4() -> ConvNet:
    return ConvNet(depth=4)


def conv4_signed() -> ConvNet:
    return ConvNet(depth=4, signed=True)


def conv6() -> ConvNet:
    return ConvNet(depth=6)
