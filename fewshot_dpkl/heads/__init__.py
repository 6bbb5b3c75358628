"""The heads, by name."""

from __future__ import annotations

import os
from typing import Any

from fewshot_dpkl.heads.base import Head, make
from fewshot_dpkl.heads.bayesian import BLRHead, BNNHead
from fewshot_dpkl.heads.calibrated import CalibratedDPKLHead
from fewshot_dpkl.heads.cosine import CosineHead
from fewshot_dpkl.heads.dpkl import DBLRHead, DPKLHead
from fewshot_dpkl.heads.logistic import LogisticRegressionHead
from fewshot_dpkl.heads.nearest import CentroidHead, NearestNeighborHead
from fewshot_dpkl.heads.own import as_head, find_class, find_heads, named_class
from fewshot_dpkl.heads.saved import read_head

HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        NearestNeighborHead,
        CentroidHead,
        CosineHead,
        LogisticRegressionHead,
        BLRHead,
        BNNHead,
        DBLRHead,
        DPKLHead,
        CalibratedDPKLHead,
    )
}

DEFAULT_HEAD = CalibratedDPKLHead.name
"""What is used where nobody names a head."""


def DPKL(preset: str = "paper", **parameters: Any) -> Head:
    """The paper's DPKL (`preset="paper"`), or the one with probabilities to trust (`preset="calibrated"`).

    Examples:
        >>> from fewshot_dpkl import DPKL
        >>> DPKL(), DPKL(preset="calibrated", particles=20)
        (DPKLHead(), CalibratedDPKLHead(particles=20))
    """
    presets = {"paper": DPKLHead.name, "calibrated": CalibratedDPKLHead.name}
    if preset not in presets:
        raise ValueError(f"there is no preset {preset!r}; choose from {', '.join(presets)}")
    return make_head(presets[preset], **parameters)


def make_head(name: str, **parameters: Any) -> Head:
    """A new head by its name: `make_head("dpkl", kernel="exact")`.

    Beside those of `HEADS`: names that installed packages offer by entry points of the group
    `fewshot_dpkl.heads`, and import paths `package.module:Name`.

    Examples:
        >>> from fewshot_dpkl import make_head
        >>> make_head("dpkl", kernel="exact")
        DPKLHead(kernel='exact')
    """
    return make(name, find_class(name, HEADS), parameters)


def load_head(path: str | os.PathLike[str]) -> Head:
    """Read a fitted head written by `head.save(path)`.

    Examples:
        >>> import tempfile, numpy as np
        >>> from fewshot_dpkl import CentroidHead, load_head
        >>> head = CentroidHead(scale=5.0).fit(np.eye(3).repeat(2, 0), [1, 1, 2, 2, 3, 3])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     head.save(f"{folder}/head.safetensors")
        ...     load_head(f"{folder}/head.safetensors")
        CentroidHead(scale=5.0)
    """
    return read_head(path, lambda name: named_class(name, HEADS))


__all__ = [
    "DEFAULT_HEAD",
    "DPKL",
    "HEADS",
    "BLRHead",
    "BNNHead",
    "CentroidHead",
    "CosineHead",
    "DBLRHead",
    "DPKLHead",
    "Head",
    "LogisticRegressionHead",
    "NearestNeighborHead",
    "as_head",
    "find_heads",
    "load_head",
    "make_head",
]
