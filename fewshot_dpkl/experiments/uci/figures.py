"""The paper's regression figures, drawn from a results folder alone."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from fewshot_dpkl.evaluation.figures import save_figure
from fewshot_dpkl.experiments.results import deviation
from fewshot_dpkl.experiments.uci.sweep import METRICS, Results

COLOURS = {"gp": "tab:grey", "dkl": "tab:orange", "dpkl": "tab:blue"}


def draw(results: Results) -> list[Path]:
    """RMSE and NLL against n, and the mean embeddings coloured by target; PNG and SVG in the folder."""
    paths = [
        path for metric in METRICS for path in save_figure(_curves(results, metric), results.folder / metric)
    ]
    embeddings = _embeddings(results)
    return paths + (save_figure(embeddings, results.folder / "embeddings") if embeddings else [])


def _curves(results: Results, metric: str) -> Figure:
    """One panel per data set; dashed lines are semi-supervised, bars one standard deviation over trials."""
    datasets, sizes = results.names("dataset"), results.names("size")
    beside = 0.006 * ((sizes[-1] - sizes[0]) or sizes[0])
    figure, axes = plt.subplots(
        1, len(datasets), figsize=(max(4 * len(datasets), 6), 3.8), squeeze=False, layout="constrained"
    )
    for axis, dataset in zip(axes[0], datasets, strict=True):
        for shift, model in enumerate(results.names("model")):
            found = [(size, results.values(dataset, model, size, metric)) for size in sizes]
            points = [(size, v.mean(), deviation(v)) for size, v in found if len(v)]
            if not points:
                continue
            n, mean, spread = map(np.array, zip(*points, strict=True))
            axis.errorbar(
                n + beside * (shift - 2.5),  # side by side, so that no bar hides another
                mean,
                spread,
                color=COLOURS[model.removeprefix("ss")],
                linestyle="--" if model.startswith("ss") else "-",
                marker="s" if model.startswith("ss") else "o",
                markersize=4,
                linewidth=1.2,
                elinewidth=0.7,
                capsize=2,
                label=model.upper(),
            )
        axis.set(title=Path(dataset).name, xlabel="labelled points n")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(METRICS[metric])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _embeddings(results: Results) -> Figure | None:
    """The test points' mean embeddings of the first trial, at the size nearest to 100."""
    datasets = results.names("dataset")
    size = min(results.names("size"), key=lambda n: abs(n - 100), default=0)
    models = [
        model
        for model in results.names("model")
        if any(results.embedding_path(dataset, model, size).exists() for dataset in datasets)
    ]
    if not models:
        return None
    figure, axes = plt.subplots(
        len(models),
        len(datasets),
        figsize=(3.8 * len(datasets), 3 * len(models)),
        squeeze=False,
        layout="constrained",
    )
    for (row, column), axis in np.ndenumerate(axes):
        path = results.embedding_path(datasets[column], models[row], size)
        axis.set(title=f"{Path(datasets[column]).name}, {models[row].upper()}, n = {size}")
        if path.exists():
            with np.load(path, allow_pickle=False) as saved:
                embedding, target = saved["embedding"], saved["target"]
            low, high = np.percentile(embedding, [0.5, 99.5], axis=0)
            margin = 0.05 * (high - low) + 1e-9
            colours = dict(zip(("vmin", "vmax"), np.percentile(target, [1, 99]), strict=True))
            points = axis.scatter(*embedding.T, c=target, s=5, cmap="viridis", rasterized=True, **colours)
            axis.set(
                xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1])
            )
            figure.colorbar(points, ax=axis, label="target")
    return figure
