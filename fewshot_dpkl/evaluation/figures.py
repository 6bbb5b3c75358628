"""Figures as files, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fewshot_dpkl.files import atomic_path


def save_figure(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `stem`.png and `stem`.svg, and close the figure."""
    paths = [stem.with_suffix(f".{kind}") for kind in kinds]
    for path in paths:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=150)
    plt.close(figure)
    return paths
