"""The three pictures of the paper's MNIST figure, drawn from a results folder alone."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from sklearn.manifold import TSNE

from fewshot_dpkl.evaluation.figures import save_figure
from fewshot_dpkl.experiments.results import Results, deviation
from fewshot_dpkl.files import atomic_path

COLOURS = {"blr": "tab:grey", "bnn": "tab:green", "dblr": "tab:orange", "dpkl": "tab:blue"}
STYLES = {"": ("-", "o"), "lengthscale": ("-", "D"), "plain": (":", "s"), "attract": ("--", "x")}
NAMES = {"lengthscale": ", ℓ chosen", "plain": ", plain logits", "attract": ", attracting particles"}
LABELS = {"error": "test error, %", "nll": "test negative log likelihood"}


def draw(results: Results) -> list[Path]:
    """Error and NLL against n, and DPKL's mean embeddings coloured by digit; PNG and SVG in the folder."""
    paths = [
        path for metric in LABELS for path in save_figure(_curves(results, metric), results.folder / metric)
    ]
    found = [size for size in results.found_sizes if embedding_path(results.folder, size).exists()]
    if not found:
        return paths
    size = min(found, key=lambda n: abs(n - 100))
    return paths + save_figure(_embedding(results.folder, size), results.folder / "embedding")


def embedding_path(folder: Path, size: int) -> Path:
    return folder / "embeddings" / f"dpkl-{size}.npz"


def save_embedding(folder: Path, size: int, embedding: np.ndarray, digits: np.ndarray) -> None:
    """The mean embeddings `[q, 2R]` on a plane, by t-SNE from their first two principal components."""
    plane = TSNE(perplexity=min(30, (len(embedding) - 1) / 3), init="pca", random_state=0)
    with atomic_path(embedding_path(folder, size)) as temporary:
        np.savez(temporary, plane=plane.fit_transform(embedding), digit=digits[: len(embedding)])


def _curves(results: Results, metric: str) -> Figure:
    """A line for each model; bars are one standard deviation over trials."""
    figure, axis = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    models = results.found_models
    sizes = results.found_sizes
    step = min(np.diff(sizes), default=100)
    for place, model in enumerate(models):
        name, _, variant = model.partition("-")
        found = [(size, results.values(model, size, metric)) for size in sizes]
        points = [(size, v.mean(), deviation(v)) for size, v in found if len(v)]
        n, mean, spread = map(np.array, zip(*points, strict=True))
        line, marker = STYLES[variant]
        axis.errorbar(
            n + step * 0.3 * ((place + 0.5) / len(models) - 0.5),  # side by side: no bar hides another
            mean, spread, color="tab:red" if variant == "lengthscale" else COLOURS[name], linestyle=line,
            marker=marker, markersize=4, linewidth=1.3, elinewidth=0.8, capsize=2,
            label=name.upper() + NAMES.get(variant, ""),
        )  # fmt: skip
    axis.set(xlabel="labelled digits n", ylabel=LABELS[metric], xticks=sizes)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(models) if len(models) <= 5 else 3, fontsize=8)
    return figure


def _embedding(folder: Path, size: int) -> Figure:
    with np.load(embedding_path(folder, size), allow_pickle=False) as saved:
        plane, digit = saved["plane"], saved["digit"]
    figure, axis = plt.subplots(figsize=(6, 5), layout="constrained")
    points = axis.scatter(
        plane[:, 0],
        plane[:, 1],
        c=digit,
        s=6,
        cmap="tab10",
        vmin=-0.5,
        vmax=9.5,
        rasterized=True,
        linewidths=0,
    )
    figure.colorbar(points, ax=axis, ticks=range(10), label="digit")
    axis.set(xticks=[], yticks=[])
    axis.set_title(f"DPKL, n = {size}: mean embeddings of {len(digit)} test digits (t-SNE)", fontsize=10)
    return figure
