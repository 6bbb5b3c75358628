"""Few-shot learning on frozen features: DPKL (Mallick et al., 2021) and its rivals.

from fewshot_dpkl import DPKLHead
head = DPKLHead().fit(support_features, support_labels)
head.predict_proba(query_features)
"""

from pathlib import Path

# `fewshot_dpkl.backbones` and `fewshot_dpkl.data` lie inside the package in a wheel, beside it in a checkout.
if (Path(__path__[0]).parent / "pyproject.toml").exists():
    __path__.append(str(Path(__path__[0]).parent))

from fewshot_dpkl.evaluation.calibration import fit_lengthscale
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

__version__ = "0.1.0"

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
    "fit_lengthscale",
    "load_head",
    "make_head",
    "paired_difference",
]
