"""Results of a comparison, on disk after every finished cell: settings, one row per trial, tables.

A cell is one (model, size), or one (data set, model, size), with all its trials. A later run with the same
settings goes on where an earlier one stopped.
"""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewshot_dpkl.evaluation.tables import markdown
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.schema import Source


class Results:
    """`results.json` and `results.csv` in a folder; always written whole.

    Args:
        settings: what must be the same for a rerun to go on from the folder.
        metrics: columns of a row beside `keys` and `trial`.
        models: in the order in which tables show them.
        keys: columns that name a cell.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: dict[str, Any],
        metrics: Sequence[str],
        models: Sequence[str],
        keys: Sequence[str] = ("model", "size"),
    ) -> None:
        self.folder = Path(folder)
        self.settings, self.metrics, self.models = settings, tuple(metrics), tuple(models)
        self.keys = tuple(keys)
        self.rows: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        if self.path.exists():
            self._continue()

    @property
    def path(self) -> Path:
        return self.folder / "results.json"

    def _continue(self) -> None:
        source = Source(self.path, "result of this program", "choose another --out")
        try:
            content = source.parse(self.path.read_bytes())
            source.fields(content, {"settings": dict, "rows": list[dict], "cells": list[dict]})
        except ValueError:
            source.no_such_kind()
        if not all(key in each for each in [*content["rows"], *content["cells"]] for key in self.keys):
            source.no_such_kind()
        before, self.rows, self.cells = content["settings"], content["rows"], content["cells"]
        for name in {**before, **self.settings}:
            old, new = before.get(name), self.settings.get(name)
            if old != new:
                difference = f"{self.path} was made with {name!s:.60} {old!r:.200}, not {new!r:.200}"
                raise ValueError(f"{difference}; choose another --out, or go on with the same settings")

    @property
    def done(self) -> set[tuple[Any, ...]]:
        return {self._key(cell) for cell in self.cells}

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self.keys)

    def add(self, rows: Sequence[dict[str, Any]], **about: Any) -> None:
        """Keep a finished cell, on disk before anything else happens; `about` goes to `cells`.

        Cells that another run has added to the folder meanwhile are kept too.
        """
        if self.path.exists():
            self._continue()
        if self._key(rows[0]) in self.done:
            return
        self.rows += rows
        self.cells.append({**{key: rows[0][key] for key in self.keys}, **about})
        self.write()

    def write(self) -> None:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        content = {"settings": self.settings, "versions": versions, "cells": self.cells, "rows": self.rows}
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1))
        found = (column for row in self.rows for column in row)
        columns = list(dict.fromkeys([*self.keys, "trial", *self.metrics, *found]))
        with atomic_path(self.folder / "results.csv") as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def values(self, *cell_and_metric: Any) -> np.ndarray:
        """`values(*key, metric)`: the metric of every trial of a cell, by trial; empty if it was not run."""
        *key, metric = cell_and_metric
        rows = [row for row in self.rows if self._key(row) == tuple(key)]
        return np.array([row[metric] for row in sorted(rows, key=lambda row: row["trial"])])

    @property
    def found_models(self) -> list[str]:
        found = {row["model"] for row in self.rows}
        return [model for model in self.models if model in found]

    @property
    def found_sizes(self) -> list[int]:
        return sorted({row["size"] for row in self.rows})

    def table(self, headings: Sequence[str], formats: Sequence[str]) -> str:
        """Every cell: mean ± one standard deviation over trials, as a Markdown table.

        `headings` and `formats` (of a number, such as `.2f`) are those of the metrics.
        """
        rows = [["n", "model", *headings]]
        for size in self.found_sizes:
            for model in self.found_models:
                cells = [self.values(model, size, metric) for metric in self.metrics]
                if len(cells[0]):
                    figures = (spread(c, deviation(c), f) for c, f in zip(cells, formats, strict=True))
                    rows.append([str(size), model, *figures])
        return markdown(rows)

    def paired(self, first: str, second: str, size: int, metric: str) -> np.ndarray | None:
        """`first` minus `second`, trial by trial; None unless both were run."""
        a, b = (self.values(model, size, metric) for model in (first, second))
        return a - b if len(a) and len(a) == len(b) else None


def spread(values: np.ndarray, deviation: float, format: str, mark: str = "") -> str:
    """`mean ± deviation`; of a single value nothing is known but itself. `mark` goes round the mean."""
    mean = f"{mark}{values.mean():{format}}{mark}"
    return f"{mean} ± {deviation:{format.lstrip('+')}}" if len(values) > 1 else mean


def deviation(values: np.ndarray) -> float:
    """The standard deviation of a sample, 0 for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
