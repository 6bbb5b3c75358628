"""Regression data sets: files to arrays `X [N, D]`, `y [N]`, and their trial splits.

A data set is a folder `<name>/` with `X.npy` and `y.npy` (the layout of the SSDKL authors' download), or a
CSV file with a header whose target column is named.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fewshot_dpkl.schema import Source

from .splits import data_root

ARRAYS = (
    "Regression/README.txt of https://github.com/ankurmallick/DPKL links to all six as <name>/X.npy and "
    "<name>/y.npy, the arrays of Jean et al. (2018)"
)
SOURCES = {
    "buzz": "Buzz in social media (Twitter), https://archive.ics.uci.edu/dataset/248, 583,250 × 77",
    "ctslice": "Relative location of CT slices, https://archive.ics.uci.edu/dataset/206, 53,500 × 384",
    "electric": "Individual household electric power, https://archive.ics.uci.edu/dataset/235, 2,049,280 × 6",
    "elevators": "Elevators (L. Torgo's collection), https://www.openml.org/d/216, 16,599 × 18",
    "parkinsons": "Parkinsons telemonitoring, https://archive.ics.uci.edu/dataset/189, 5,875 × 20",
    "skillcraft": "SkillCraft1 master table, https://archive.ics.uci.edu/dataset/272, 3,338 × 18",
}


def read_uci(dataset: str, root: str | os.PathLike[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[N, D]` and targets `[N]` in float64.

    Args:
        dataset: a name under the data root (`elevators`), or `FILE.csv:TARGET` with the target's column.
        root: see `data.splits.data_root`; `<root>/uci/<name>/` and `<root>/<name>/` are looked at.
    """
    if ".csv" in dataset:
        path, _, target = dataset.rpartition(":") if ".csv:" in dataset else (dataset, "", "")
        return _checked(dataset, *read_csv(Path(path), target))
    base = data_root(root)
    for folder in (base / "uci" / dataset, base / dataset):
        if (folder / "X.npy").exists() and (folder / "y.npy").exists():
            return _checked(str(folder), _load(folder / "X.npy"), _load(folder / "y.npy"))
    where = f"{SOURCES[dataset]}; {ARRAYS}" if dataset in SOURCES else "or give FILE.csv:TARGET"
    raise FileNotFoundError(
        f"there is no {dataset}/X.npy with y.npy in {base / 'uci'} or {base}; set --data-root or "
        f"$FEWSHOT_DPKL_DATA to the folder that holds it ({where})"
    )


def _load(path: Path) -> np.ndarray:
    source = Source(path, "array of numbers", "write it with numpy.save")
    found = source.npy()
    if found.dtype.kind not in "biuf":
        source.no_such_kind()
    return found.astype(np.float64)


def read_csv(path: Path, target: str) -> tuple[np.ndarray, np.ndarray]:
    """A CSV file with a header: the column `target`, and all others as inputs."""
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows = [row for row in csv.reader(file) if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a CSV file ({error}); save it as one, in UTF-8") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if target not in header:
        names = ", ".join(header)[:500]
        raise ValueError(
            f"{path} has no target column {target!r}; write FILE.csv:TARGET with one of: {names}"
        )
    try:
        table = np.array(rows[1:], dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{path} must hold numbers only, equally many in each row ({error})") from None
    if table.ndim != 2 or table.shape[1] != len(header):
        raise ValueError(
            f"{path} has {len(header)} names in its header, but its rows do not; repair the file"
        )
    column = header.index(target)
    return np.delete(table, column, axis=1), table[:, column]


def _checked(name: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = y.reshape(-1)
    if x.ndim != 2 or x.shape[1] == 0 or len(x) != len(y):
        raise ValueError(f"{name}: X is {x.shape} and y {y.shape}; expected N × D inputs and N targets")
    bad = ~(np.isfinite(x).all(1) & np.isfinite(y))
    if bad.any():
        raise ValueError(
            f"{name} has missing or infinite values in {bad.sum()} rows; remove or fill them first"
        )
    return x, y


@dataclass(frozen=True)
class TrialSplit:
    """Row numbers of one size: `test [q]`, `labelled [T, n]`, `unlabelled [T, u]`, `training [N - q]`.

    `training` is every row outside the test set: what the inputs are standardised on.
    """

    test: np.ndarray
    labelled: np.ndarray
    unlabelled: np.ndarray
    training: np.ndarray


def split_trials(
    rows: int, size: int, trials: int, *, unlabelled: int, test: int = 1000, seed: int = 0
) -> TrialSplit:
    """The same test rows for every trial and size; each trial its own shuffle of the others.

    A trial's labelled rows come first in its shuffle, the unlabelled after them: its sets of different
    sizes are nested, and trial t is the same whatever the number of trials.
    """
    if rows < test + size + 1:
        raise ValueError(
            f"the data has {rows} rows, but {test} test rows and {size} labelled rows were asked for; "
            "lower --test or --sizes"
        )
    shuffled = np.random.default_rng([seed, 0]).permutation(rows)
    held, others = shuffled[:test], shuffled[test:]
    orders = np.stack(
        [np.random.default_rng([seed, 1, trial]).permutation(others) for trial in range(trials)]
    )
    return TrialSplit(held, orders[:, :size], orders[:, size : size + unlabelled], others)
