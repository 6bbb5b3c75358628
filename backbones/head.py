"""The training head of Baseline++ (Chen et al. 2019): a cosine classifier."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CosineClassifier(nn.Module):
    """Scores are scale_c · cos(features, weights of class c), with a learnable scale per class.

    The class weights are a map `[C, channels, S, S]`: for pictures of another size they are resampled
    to the size of the feature map, so that one head trains on small and on large pictures.
    """

    def __init__(self, classes: int, channels: int, map_size: int, scale: float = 10.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, channels, map_size, map_size))
        self.log_scale = nn.Parameter(torch.full((classes,), math.log(scale)))

    def forward(self, feature_map: Tensor) -> Tensor:
        """Feature map `[B, channels, H, W]` to scores `[B, C]`."""
        weight: Tensor = self.weight
        if weight.shape[2:] != feature_map.shape[2:]:
            weight = F.interpolate(weight, feature_map.shape[2:], mode="bilinear", align_corners=False)
        cosine = F.normalize(feature_map.flatten(1), dim=1) @ F.normalize(weight.flatten(1), dim=1).T
        return cosine * self.log_scale.exp()
