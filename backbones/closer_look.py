"""Import weights that were trained with CloserLookFewShot (Chen et al. 2019)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .conv import ConvNet

_KEY = re.compile(r"(?:feature\.)?trunk\.(\d+)\.(C|BN)\.(\w+)$")


def conv_from_closer_look(state: Mapping[str, Tensor]) -> ConvNet:
    """A ConvNet with the weights of their Conv4 or Conv6.

    `state` is a state dict with keys like `feature.trunk.0.C.weight` and `feature.trunk.0.BN.bias` (the
    `state` entry of their `.tar` files, read with `torch.load(path, weights_only=True)`). Their
    convolutions have a bias; here it moves into the batch normalisation, which subtracts it.
    """
    blocks: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        match = _KEY.match(key)
        if match:
            blocks.setdefault(int(match[1]), {})[f"{match[2]}.{match[3]}"] = value
    depth = len(blocks)
    if depth not in (4, 6) or sorted(blocks) != list(range(depth)):
        raise ValueError(
            f"found {depth} convolution blocks in the state dict, expected 4 (Conv4) or 6 (Conv6) "
            "with keys like feature.trunk.0.C.weight"
        )
    net = ConvNet(depth, width=blocks[0]["C.weight"].shape[0])
    renamed: dict[str, Tensor] = {}
    for index, block in blocks.items():
        prefix = f"blocks.{index}."
        renamed[prefix + "conv.weight"] = block["C.weight"]
        for name in ("weight", "bias", "running_mean", "running_var"):
            renamed[f"{prefix}norm.{name}"] = block[f"BN.{name}"]
        renamed[prefix + "norm.running_mean"] = block["BN.running_mean"] - block["C.bias"]
        renamed[prefix + "norm.num_batches_tracked"] = block.get("BN.num_batches_tracked", torch.tensor(0))
    net.load_state_dict(renamed)
    return net.eval()
