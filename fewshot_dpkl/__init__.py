"""Few-shot learning on frozen features: DPKL (Mallick et al., 2021) and its rivals.

from fewshot_dpkl import DPKLHead
head = DPKLHead().fit(support_features, support_labels)
head.predict_proba(query_features)
"""

from fewshot_dpkl.calibration import fit_lengthscale
from fewshot_dpkl.classifier import FewShotClassifier
from fewshot_dpkl.embedding import Backbone, find_backbone
from fewshot_dpkl.episodes import EpisodeSampler
from fewshot_dpkl.evaluation import HeadResult, evaluate, paired_difference
from fewshot_dpkl.features import FeatureSet
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
