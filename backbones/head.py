"""What a backbone is trained by: the cosine classifier of Baseline++ (Chen et al. 2019), and prototypes."""

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


def prototype_loss(features: Tensor, labels: Tensor, scale: float = 10.0) -> Tensor:
    """Cross-entropy of a softmax of cosines to the class means of the batch: an episode (Snell et al. 2017).

    A picture has no part in the mean of its own class. Pictures that are alone in their class do not count.

    Arguments: `features` `[B, D]`, `labels` `[B]`.
    """
    unit = F.normalize(features, dim=1)
    classes, own = labels.unique(return_inverse=True)
    members = F.one_hot(own, len(classes)).to(unit)  # B K
    sums = members.T @ unit  # K D
    without = (unit * F.normalize(sums[own] - unit, dim=1)).sum(1, keepdim=True)  # B 1
    cosine = torch.where(members > 0, without, unit @ F.normalize(sums, dim=1).T)  # B K
    counted = members.sum(0)[own] > 1
    if not counted.any():
        return features.sum() * 0.0  # still a part of the graph, as data-parallel training wants it
    return F.cross_entropy(scale * cosine[counted], own[counted])
