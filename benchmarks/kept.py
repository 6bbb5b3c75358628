"""Results of a head that are kept in a file, so that a study that was stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np

from fewshot_dpkl import HeadResult
from fewshot_dpkl.files import atomic_path


def finished(path: Path, make: Callable[[], HeadResult]) -> HeadResult:
    """The result in `path`, or that of `make`, which is written there."""
    if not path.exists():
        result = make()
        arrays = {field.name: getattr(result, field.name) for field in fields(result)}
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **{key: value for key, value in arrays.items() if value is not None})
    with np.load(path) as arrays:
        return HeadResult(**arrays)
