"""Results of a comparison, on disk after every finished cell: settings, one row per trial, tables.

A cell is one (model, size) with all its trials. A later run with the same settings goes on where an
earlier one stopped.
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

from fewshot_dpkl.files import atomic_path


class Results:
    """`results.json` and `results.csv` in a folder; always written whole.

    Args:
        settings: what must be the same for a rerun to go on from the folder.
        metrics: columns of a row beside `model`, `size` and `trial`.
        models: in the order in which tables show them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: dict[str, Any],
        metrics: Sequence[str],
        models: Sequence[str],
    ) -> None:
        self.folder = Path(folder)
        self.settings, self.metrics, self.models = settings, tuple(metrics), tuple(models)
        self.rows: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        if self.path.exists():
            self._continue()

    @property
    def path(self) -> Path:
        return self.folder / "results.json"

    def _continue(self) -> None:
        try:
            content = json.loads(self.path.read_text())
            before, self.rows, self.cells = content["settings"], content["rows"], content["cells"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError(f"{self.path} is not a result of this program; choose another --out") from None
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.path} was made with {name} {before.get(name)!r}, not {value!r}; choose another "
                    "--out, or go on with the same settings"
                )

    @property
    def done(self) -> set[tuple[str, int]]:
        return {(cell["model"], cell["size"]) for cell in self.cells}

    def add(self, rows: Sequence[dict[str, Any]], **about: Any) -> None:
        """Keep a finished cell, on disk before anything else happens; `about` goes to `cells`."""
        self.rows += rows
        self.cells.append({"model": rows[0]["model"], "size": rows[0]["size"], **about})
        self.write()

    def write(self) -> None:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        content = {"settings": self.settings, "versions": versions, "cells": self.cells, "rows": self.rows}
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1))
        found = (column for row in self.rows for column in row)
        columns = list(dict.fromkeys(["model", "size", "trial", *self.metrics, *found]))
        with atomic_path(self.folder / "results.csv") as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def values(self, model: str, size: int, metric: str) -> np.ndarray:
        """The metric of every trial of a cell, by trial; empty if the cell was not run."""
        rows = [row for row in self.rows if (row["model"], row["size"]) == (model, size)]
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
        lines = [f"| n | model | {' | '.join(headings)} |", "|---|---" + "|---" * len(headings) + "|"]
        for size in self.found_sizes:
            for model in self.found_models:
                cells = [self.values(model, size, metric) for metric in self.metrics]
                if len(cells[0]):
                    figures = [
                        f"{c.mean():{f}} ± {deviation(c):{f}}" for c, f in zip(cells, formats, strict=True)
                    ]
                    lines.append(f"| {size} | {model} | {' | '.join(figures)} |")
        return "\n".join(lines)

    def paired(self, first: str, second: str, size: int, metric: str) -> np.ndarray | None:
        """`first` minus `second`, trial by trial; None unless both were run."""
        a, b = (self.values(model, size, metric) for model in (first, second))
        return a - b if len(a) and len(a) == len(b) else None


def deviation(values: np.ndarray) -> float:
    """The standard deviation of a sample, 0 for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
