"""The picture of bench_heads.py, drawn from the document that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fewshot_dpkl.evaluation.figures import plt


def draw(document: dict[str, Any], path: Path) -> None:
    """Times of all heads on the left; how DPKL's time grows, and what workers gain, on the right."""
    figure = plt.figure(figsize=(15, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 5)
    rows = sorted(document["heads"].items(), key=lambda row: row[1]["seconds"])
    bars = figure.add_subplot(grid[:, :2])
    kinds = {"reference": "#c44e52", "scikit-learn": "#8172b3", "ours": "#4c72b0"}
    for kind, colour in kinds.items():
        mine = [row for row in rows if kind_of(row[0]) == kind]
        milliseconds = [1e3 * row["seconds"] for _, row in mine]
        drawn = bars.barh([rows.index(row) for row in mine], milliseconds, color=colour, label=kind)
        labels = [f"{duration(row['seconds'])}, {100 * row['accuracy']:.1f} %" for _, row in mine]
        bars.bar_label(drawn, labels, padding=4, fontsize=8)
    bars.set_yticks(range(len(rows)), [row[0] for row in rows])
    bars.set(xscale="log", xlabel="milliseconds an episode (accuracy beside it)")
    bars.set_xlim(right=1000 * max(1e3 * row[1]["seconds"] for row in rows))
    bars.legend(loc="lower right", frameon=False)
    places = [grid[i, j] for i in range(2) for j in range(2, 5)]
    for place, (what, times) in zip(places, document["growth"].items(), strict=False):
        axis = figure.add_subplot(place)
        axis.plot([int(x) for x in times], [1e3 * t for t in times.values()], marker="o", color=kinds["ours"])
        axis.set(xscale="log", yscale="log", xlabel=what, ylabel="ms an episode, one core")
        axis.set_xticks([int(x) for x in times], list(map(str, times)), fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(1, 1000)
        axis.grid(alpha=0.3)
    axis = figure.add_subplot(places[5])
    workers = document["workers"]
    drawn = axis.barh([name.replace(" in", "\nin") for name in workers], [1e3 * t for t in workers.values()])
    axis.bar_label(drawn, fmt="%.0f", padding=3)
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.set(xlabel="ms an episode, all cores")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def kind_of(name: str) -> str:
    return name.split()[0] if name.startswith(("reference", "scikit-learn")) else "ours"
