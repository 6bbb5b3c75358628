"""Batch normalisation, 2×2 max-pooling and (where there is one) ReLU as one training step on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _NormPool(torch.autograd.Function):
    """pool(γ (z - mean) / std + β) for γ ≥ 0, with the moments of the unpooled `z`; then ReLU, if asked.

    A positive scale lets the maximum come first, so normalisation and ReLU touch a quarter of the
    values; backward adds the two dense terms of batch normalisation in one pass over `z`.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, gamma: Tensor, beta: Tensor, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros_like(gamma), torch.zeros_like(gamma)  # their type is that of the moments
        mean, var = torch.ops.aten.batch_norm_update_stats(z, *unused, 0.0)  # of this batch alone
        std_inverse = (var + eps).rsqrt()
        pooled, winners = F.max_pool2d(z, 2, return_indices=True)  # B C H/2 W/2
        scale = gamma * std_inverse
        out = (pooled * _per_channel(scale, z)).add_(_per_channel(beta - mean * scale, z))
        if relu:
            out.relu_()
        ctx.relu = relu
        ctx.save_for_backward(z, winners, pooled, out, gamma, mean, std_inverse)
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        z, winners, pooled, out, gamma, mean, std_inverse = ctx.saved_tensors
        count = z.numel() // z.shape[1]
        grad = torch.ops.aten.threshold_backward(grads[0], out, 0) if ctx.relu else grads[0]  # B C H/2 W/2
        grad_beta = grad.sum((0, 2, 3), dtype=gamma.dtype)
        grad_gamma = ((grad * pooled).sum((0, 2, 3), dtype=gamma.dtype) - mean * grad_beta) * std_inverse
        scale = gamma * std_inverse
        # dz = scale · (unpool(grad) - grad_beta / count - (z - mean) / std · grad_gamma / count)
        slope = -scale * grad_gamma * std_inverse / count
        offset = -scale * grad_beta / count - slope * mean
        grad_z = torch.ops.aten.max_pool2d_with_indices_backward(
            grad * _per_channel(scale, z), z, [2, 2], [2, 2], [0, 0], [1, 1], False, winners
        )
        grad_z.addcmul_(z, _per_channel(slope, z)).add_(_per_channel(offset, z))
        return grad_z, grad_gamma, grad_beta, None, None


def norm_pool(
    z: Tensor, gamma: Tensor, beta: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`max_pool2d(batch_norm(z), 2)` in training mode, for γ ≥ 0, then ReLU if asked, with the batch moments.

    Arguments: `z` `[B, C, H, W]` channels-last, `gamma` and `beta` `[C]`.
    Returns: the output `[B, C, H // 2, W // 2]`, the mean `[C]` and the biased variance `[C]` of `z`.
    """
    return _NormPool.apply(z, gamma, beta, eps, relu)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like).view(1, -1, 1, 1)
