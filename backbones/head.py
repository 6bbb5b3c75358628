"""What a backbone is trained by: the cosine classifier of Baseline++ (Chen et al. 2019), and neighbours."""

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


def neighbour_loss(features: Tensor, labels: Tensor, scale: float = 10.0) -> Tensor:
    """-log of the chance that a picture's neighbour in the batch is of its own class, on average.

    A picture takes another one of the batch for its neighbour with a probability proportional to
    exp(scale · cosine) (Goldberger et al. 2004): what 1-NN does, made smooth. Pictures that are alone in
    their class do not count.

    Arguments: `features` `[B, D]`, `labels` `[B]`.
    """
    unit = F.normalize(features, dim=1)
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    log_chance = (unit @ unit.T * scale).masked_fill(itself, -torch.inf).log_softmax(1)  # B B
    same = (labels[:, None] == labels[None]) & ~itself
    counted = same.any(1)
    if not counted.any():
        return features.sum() * 0.0  # still a part of the graph, as data-parallel training wants it
    return -log_chance[counted].masked_fill(~same[counted], -torch.inf).logsumexp(1).mean()
