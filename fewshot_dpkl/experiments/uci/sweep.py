"""A comparison of regressors over data sets and label budgets: cells, results on disk, tables.

A cell is one (data set, model, size) with all its trials, trained as one batch. Every finished cell is
written at once, and a later run with the same settings goes on from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshot_dpkl.evaluation.tables import markdown
from fewshot_dpkl.experiments import results
from fewshot_dpkl.experiments.results import deviation, spread
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.parallel import on_every_core
from fewshot_dpkl.regression.estimators import DKLRegressor, DPKLRegressor, EmbeddingGP, GPRegressor
from fewshot_dpkl.regression.gp import gaussian_nll
from fewshot_dpkl.regression.training import Trained, train

REGRESSORS: dict[str, Callable[[], EmbeddingGP]] = {
    "gp": GPRegressor,
    "dkl": DKLRegressor,
    "dpkl": DPKLRegressor,
}
MODELS = ("gp", "ssgp", "dkl", "ssdkl", "dpkl", "ssdpkl")
PAIRS = (("dpkl", "dkl"), ("ssdpkl", "ssdkl"), ("dpkl", "gp"), ("ssdpkl", "ssgp"), ("ssdpkl", "dpkl"))
METRICS = {"rmse": "RMSE of the standardised target", "nll": "negative log likelihood"}


@dataclass(frozen=True)
class Cell:
    """One (data set, model, size): the arrays and the row numbers of its trials.

    `test [q]`, `training [N - q]` (all rows but the test rows), `labelled [T, n]`, `unlabelled [T, u]`.
    """

    dataset: str
    model: str
    size: int
    x: np.ndarray
    y: np.ndarray
    test: np.ndarray
    training: np.ndarray
    labelled: np.ndarray
    unlabelled: np.ndarray
    seed: int = 0
    device: str = "cpu"
    learn: bool = False  # noise variance and lengthscale, beyond the paper

    @property
    def key(self) -> tuple[str, str, int]:
        return self.dataset, self.model, self.size

    @property
    def semi_supervised(self) -> bool:
        return self.model.startswith("ss")

    @property
    def regressor(self) -> EmbeddingGP:
        regressor = REGRESSORS[self.model.removeprefix("ss")]()
        learnt = [name for name in regressor.get_params() if name in ("learn_noise", "learn_lengthscale")]
        return regressor.set_params(**dict.fromkeys(learnt, self.learn))

    @property
    def work(self) -> float:
        """Rough cost, for the progress bar and for starting the longest cells first."""
        particles = self.regressor.settings().particles
        unlabelled = self.unlabelled.shape[1] if self.semi_supervised else 0
        networks = 5e4 * particles * (self.size + unlabelled)
        width = min(self.size, 200) if particles > 1 else self.size
        algebra = (2.0 * width + 400) * width * unlabelled + 4.0 * width**2 * self.size
        return len(self.labelled) * (networks + algebra)


@dataclass(frozen=True)
class CellResult:
    """One row per trial, the seconds, and the first trial's mean embedding of the test points."""

    key: tuple[str, str, int]
    rows: list[dict[str, Any]]
    seconds: float  # on the wall clock
    cpu_seconds: float
    embedding: np.ndarray  # q d
    target: np.ndarray  # q


def trial_tensors(cell: Cell) -> dict[str, Tensor]:
    """Inputs standardised on all rows outside the test set, targets on each trial's labelled rows.

    A column that is constant outside the test set is dropped.
    """
    mean, spread = cell.x[cell.training].mean(0), cell.x[cell.training].std(0)
    x = (cell.x - mean) / np.where(spread > 1e-12 * np.abs(mean), spread, np.inf)
    labelled = cell.y[cell.labelled]  # T n
    shift, scale = labelled.mean(1, keepdims=True), labelled.std(1, keepdims=True)
    if not (scale > 0).all():
        raise ValueError(
            f"{cell.dataset}: the {cell.size} labelled targets of a trial are all the same; use more points, "
            "or a target that varies"
        )
    trials = len(labelled)
    return {
        "x": torch.as_tensor(x[cell.labelled], dtype=torch.float32),
        "y": torch.as_tensor((labelled - shift) / scale),
        "unlabelled": torch.as_tensor(x[cell.unlabelled], dtype=torch.float32),
        "x_test": torch.as_tensor(x[cell.test]).expand(trials, -1, -1),
        "y_test": torch.as_tensor((cell.y[cell.test] - shift) / scale),  # T q
    }


def train_cell(cell: Cell) -> tuple[Trained, dict[str, Tensor]]:
    """Train all trials of a cell as one batch; each trial's networks follow from (seed, trial) alone."""
    tensors = {name: tensor.to(cell.device) for name, tensor in trial_tensors(cell).items()}
    unlabelled = tensors["unlabelled"] if cell.semi_supervised else None
    if unlabelled is not None and unlabelled.shape[1] == 0:
        raise ValueError(
            f"{cell.dataset}: no rows are left as unlabelled points for {cell.model}; lower --sizes or raise "
            "--unlabeled"
        )
    regressor = cell.regressor
    seeds = [
        int(np.random.SeedSequence([cell.seed, trial]).generate_state(1, np.uint64)[0] >> 1)
        for trial in range(len(cell.labelled))
    ]
    model = regressor.start(cell.x.shape[1], seeds).to(cell.device)
    return train(model, tensors["x"], tensors["y"], unlabelled, regressor.settings()), tensors


def run_cell(cell: Cell) -> CellResult:
    """Train and test a cell: RMSE and mean negative log likelihood of the standardised target."""
    started, cpu_started = time.perf_counter(), time.thread_time()
    trained, tensors = train_cell(cell)
    mean, variance = trained.predict(tensors["x_test"])
    rmse = (mean - tensors["y_test"]).square().mean(-1).sqrt().tolist()
    nll = gaussian_nll(tensors["y_test"], mean, variance).mean(-1).tolist()
    names = dict(zip(("dataset", "model", "size"), cell.key, strict=True))
    rows = [{**names, "trial": t, "rmse": rmse[t], "nll": nll[t]} for t in range(len(rmse))]
    with torch.no_grad():
        embedding = trained.model.latent(tensors["x_test"].double())[0].mean(0)  # q d
    seconds, cpu_seconds = time.perf_counter() - started, time.thread_time() - cpu_started
    return CellResult(cell.key, rows, seconds, cpu_seconds, embedding.cpu().numpy(), cell.y[cell.test])


def run_cells(cells: Sequence[Cell], workers: int) -> Iterator[CellResult]:
    """Results as they come, a cell to each of `workers` cores.

    Independent cells keep every core busy, which threads inside one small matrix product do not. Which
    worker takes a cell changes nothing in its result.
    """
    return on_every_core(run_cell, cells, workers, ordered=False)


class Results(results.Results):
    """`results.json` and `results.csv` in a folder, and the embeddings that the figures show."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        super().__init__(folder, settings, tuple(METRICS), MODELS, keys=("dataset", "model", "size"))

    def add_cell(self, result: CellResult) -> None:
        """Keep a finished cell, on disk before anything else happens."""
        if result.embedding.shape[1] == 2:
            with atomic_path(self.embedding_path(*result.key)) as temporary:
                np.savez(temporary, embedding=result.embedding, target=result.target)
        seconds = {"seconds": round(result.seconds, 3), "cpu_seconds": round(result.cpu_seconds, 3)}
        self.add(result.rows, **seconds)

    def embedding_path(self, dataset: str, model: str, size: int) -> Path:
        return self.folder / "embeddings" / f"{Path(dataset).name.replace(':', '-')}-{model}-{size}.npz"

    def names(self, column: str) -> list[Any]:
        """The data sets, models or sizes that have results, in a fixed order."""
        found = {row[column] for row in self.rows}
        return [model for model in MODELS if model in found] if column == "model" else sorted(found)

    def tables(self) -> str:
        """Every cell and every paired difference as Markdown tables, one of each per metric."""
        parts = []
        for metric, label in METRICS.items():
            parts += [f"{label}, mean ± one standard deviation over trials:", self.cell_table(metric)]
            if paired := self.paired_table(metric):
                parts += [f"{label}, paired by trial, mean ± standard error (trials below zero):", paired]
        return "\n\n".join(parts)

    def cell_table(self, metric: str) -> str:
        """A row for each data set and size, a column for each model; the lowest mean is bold."""

        def row(dataset: str, size: int) -> list[str]:
            cells = [self.values(dataset, model, size, metric) for model in models]
            least = min((cell.mean() for cell in cells if len(cell)), default=None)
            marks = ["**" if len(cell) and cell.mean() == least else "" for cell in cells]
            return [
                spread(cell, deviation(cell), ".3f", mark) if len(cell) else ""
                for mark, cell in zip(marks, cells, strict=True)
            ]

        models = self.names("model")
        return self._table([model.upper() for model in models], row)

    def paired_table(self, metric: str) -> str:
        """A row for each data set and size, a column for each of `PAIRS`; empty if no pair was run."""

        def row(dataset: str, size: int) -> list[str]:
            shown = []
            for pair in pairs:
                a, b = (self.values(dataset, model, size, metric) for model in pair)
                if len(a) == 0 or len(a) != len(b):
                    shown.append("")
                    continue
                error = deviation(a - b) / len(a) ** 0.5
                shown.append(f"{spread(a - b, error, '+.3f')} ({(a < b).sum()}/{len(a)})")
            return shown

        found = self.names("model")
        pairs = [pair for pair in PAIRS if set(pair) <= set(found)]
        return self._table([" - ".join(pair).upper() for pair in pairs], row) if pairs else ""

    def _table(self, columns: Sequence[str], row: Callable[[str, int], list[str]]) -> str:
        rows = [["data set", "n", *columns]]
        for dataset in self.names("dataset"):
            for size in self.names("size"):
                cells = row(dataset, size)
                if any(cells):
                    rows.append([dataset, str(size), *cells])
        return markdown(rows)
