"""The paper's MNIST comparison (appendices B.2 and C.3): the few-shot heads, one trial an episode."""

from fewshot_dpkl.experiments.mnist.models import (
    DEFAULT,
    MODELS,
    PAPER,
    SETTINGS,
    fit_trials,
    mean_embedding_of,
)
from fewshot_dpkl.experiments.mnist.sweep import Cell, CellResult, run_cell, run_cells

__all__ = [
    "DEFAULT",
    "MODELS",
    "PAPER",
    "SETTINGS",
    "Cell",
    "CellResult",
    "fit_trials",
    "mean_embedding_of",
    "run_cell",
    "run_cells",
]
