"""The names that `fewshot_dpkl` offers, loaded when the first of them is asked for."""

from fewshot_dpkl.evaluation.episodes import EpisodeSampler
from fewshot_dpkl.evaluation.evaluator import HeadResult, evaluate, paired_difference
from fewshot_dpkl.evaluation.features import FeatureSet
from fewshot_dpkl.heads import (
    DPKL,
    HEADS,
    BLRHead,
    BNNHead,
    CalibratedDPKLHead,
    CentroidHead,
    CosineHead,
    DBLRHead,
    DPKLHead,
    Head,
    LogisticRegressionHead,
    NearestNeighborHead,
    load_head,
    make_head,
)
from fewshot_dpkl.pictures.classifier import FewShotClassifier
from fewshot_dpkl.pictures.embedding import Backbone, find_backbone

__all__ = [
    "DPKL",
    "HEADS",
    "BLRHead",
    "BNNHead",
    "Backbone",
    "CalibratedDPKLHead",
    "CentroidHead",
    "CosineHead",
    "DBLRHead",
    "DPKLHead",
    "EpisodeSampler",
    "FeatureSet",
    "FewShotClassifier",
    "Head",
    "HeadResult",
    "LogisticRegressionHead",
    "NearestNeighborHead",
    "evaluate",
    "find_backbone",
    "load_head",
    "make_head",
    "paired_difference",
]
