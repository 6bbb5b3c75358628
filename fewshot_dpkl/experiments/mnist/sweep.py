"""Cells of the MNIST comparison: one (model, size) with all its trials, trained as one batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshot_dpkl.experiments.mnist.models import (
    BATCH,
    EPOCHS,
    LENGTHSCALES,
    fit_trials,
    make_heads,
    mean_embedding_of,
    score,
)
from fewshot_dpkl.parallel import on_every_core

EMBEDDED = 2000  # test digits of which a cell of DPKL keeps the mean embedding


@dataclass(frozen=True)
class Cell:
    """One (model, size): the pixels and the row numbers of its trials.

    `images [N, 784]`, `test_images [q, 784]` uint8; `training [T, n]` and `validation [T, v]` are rows of
    `images`.
    """

    model: str
    size: int
    images: np.ndarray
    labels: np.ndarray
    training: np.ndarray
    validation: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    seed: int = 0
    epochs: int = EPOCHS
    device: str = "cpu"

    @property
    def key(self) -> tuple[str, int]:
        return self.model, self.size

    @property
    def checks(self) -> int:
        """How often the training of a cell reports: once in 10 epochs of every candidate."""
        return -(-self.epochs // 10) * (len(LENGTHSCALES) if self.model == "dpkl-lengthscale" else 1)

    @property
    def work(self) -> float:
        """Rough seconds of one core, for the progress bar and for starting the longest cells first."""
        a_step = {"blr": 0.6e-3, "dblr": 0.9e-3}.get(self.model.split("-")[0], 4e-3)
        steps = 10 * self.checks * -(-self.training.shape[1] // BATCH)
        test = {"blr": 1e-5, "dblr": 2e-5}.get(self.model.split("-")[0], 1e-4)
        return len(self.training) * (steps * a_step + len(self.test_labels) * test)


@dataclass(frozen=True)
class CellResult:
    """One row per trial, the seconds on the wall clock, and of DPKL the first trial's mean embeddings."""

    key: tuple[str, int]
    rows: list[dict[str, Any]]
    seconds: float
    embedding: np.ndarray | None  # q 2R, of the first test digits


def tensors(cell: Cell, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Pixels between 0 and 1 `[T, n, 784]` and labels `[T, n]` of some training digits."""
    pixels = torch.as_tensor(cell.images[rows], device=cell.device)
    return pixels.float() / 255, torch.as_tensor(cell.labels[rows], device=cell.device)


def trial_seed(seed: int, trial: int) -> int:
    return int(np.random.SeedSequence([seed, trial]).generate_state(1, np.uint64)[0] >> 1)


def run_cell(cell: Cell, on_check: Callable[[int], None] | None = None) -> CellResult:
    """Train and test a cell: error in percent and mean negative log likelihood on the test digits."""
    started = time.perf_counter()
    seeds = [trial_seed(cell.seed, trial) for trial in range(len(cell.training))]
    heads = make_heads(cell.model, cell.seed, cell.epochs)
    fitted = fit_trials(heads, tensors(cell, cell.training), tensors(cell, cell.validation), seeds, on_check)
    digits = torch.as_tensor(cell.test_images, device=cell.device).float() / 255
    error, nll = score(fitted, digits, torch.as_tensor(cell.test_labels, device=cell.device))
    rows = [
        {"model": cell.model, "size": cell.size, "trial": t, "error": float(error[t]), "nll": float(nll[t])}
        for t in range(len(seeds))
    ]
    if len(heads) > 1:
        for part in fitted:
            for t in part.trials.tolist():
                rows[t]["lengthscale"] = round(part.head.get_params()["lengthscale"], 4)
    embedding = None
    if cell.model == "dpkl":
        embedding = mean_embedding_of(fitted[0], digits[:EMBEDDED], cell.seed).cpu().numpy()
    return CellResult(cell.key, rows, time.perf_counter() - started, embedding)


def run_cells(
    cells: Sequence[Cell], workers: int, progress: Callable[[Cell], None] | None = None
) -> Iterator[CellResult]:
    """Results as they come, a cell to each of `workers` cores.

    `progress` is called at every check of a cell, `cell.checks` times, by one worker at a time.
    """
    one_at_a_time = threading.Lock()

    def run(cell: Cell) -> CellResult:
        def on_check(_epoch: int) -> None:
            if progress:
                with one_at_a_time:
                    progress(cell)

        return run_cell(cell, on_check)

    return on_every_core(run, cells, workers, ordered=False)
