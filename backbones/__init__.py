"""Pictures to feature vectors: backbones, their Baseline++ training, and frozen extractors."""

from .closer_look import conv_from_closer_look
from .extract import Extractor, extract_features, fold_batch_norm, load_backbone
from .models import ARCHITECTURES, build, centre_crop
from .recipe import Recipe, Stage
from .train import train

__all__ = [
    "ARCHITECTURES",
    "Extractor",
    "Recipe",
    "Stage",
    "build",
    "centre_crop",
    "conv_from_closer_look",
    "extract_features",
    "fold_batch_norm",
    "load_backbone",
    "train",
]
