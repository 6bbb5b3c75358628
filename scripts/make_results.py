"""Print the tables and figures of RESULTS.md: every head, mini-ImageNet, CUB, and from one to the other.

    python scripts/make_results.py --work runs/results --out RESULTS.md
    python scripts/make_results.py --work runs/quick --episodes 20 --out /tmp/RESULTS.md

Extracts the features of the novel classes with the shipped backbones, runs every head on the same episodes
and keeps each finished run in --work, so that a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from _cli import add_device_arguments, run, use_device
from tqdm import tqdm

from backbones import extract_features, load_backbone
from data import load_pixels, open_split
from fewshot_dpkl import HEADS, EpisodeSampler, FeatureSet, HeadResult, evaluate
from fewshot_dpkl.calibration import head_for
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.metrics import mean_interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS = {  # title: backbone, data set
    "mini-ImageNet": ("conv4-mini-imagenet", "mini-imagenet"),
    "CUB": ("conv4-cub", "cub"),
    "mini-ImageNet backbone on CUB": ("conv4-mini-imagenet", "cub"),
}
PAPER = {  # table 1
    "mini-ImageNet": {"nn": "61.93 ± 0.65", "dblr": "60.12 ± 0.63", "dpkl": "64.96 ± 0.62"},
    "CUB": {"nn": "68.94 ± 0.74", "dblr": "68.48 ± 0.71", "dpkl": "69.11 ± 0.72"},
}
COMPARED = tuple(name for name in HEADS if name != "bnn")  # a model of the MNIST figure
FAST = ("nn", "centroid", "logreg", "dpkl-calibrated")  # what is swept over shots and ways
SHOTS, WAYS = (1, 2, 5, 10, 20), (5, 10, 20)


@dataclass(frozen=True)
class Cell:
    """One head on the episodes of one setting."""

    task: str
    way: int
    shot: int
    head: str

    @property
    def file(self) -> str:
        return f"{self.task.replace(' ', '-')}-{self.way}way-{self.shot}shot-{self.head}.json".lower()


def cells() -> list[Cell]:
    """All heads at 5 shots and at 1; the fast ones over shots and ways."""
    found = [Cell(task, 5, shot, head) for shot in (5, 1) for task in TASKS for head in COMPARED]
    for task in TASKS:
        found += [Cell(task, 5, shot, head) for shot in SHOTS for head in FAST]
        found += [Cell(task, way, 5, head) for way in WAYS for head in FAST]
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for features and finished runs")
    parser.add_argument("--out", type=Path, default=Path("RESULTS.md"), help="(default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    add_device_arguments(parser)
    arguments = parser.parse_args()
    device = use_device(arguments)
    results: dict[Cell, dict[str, Any]] = {}
    features: dict[str, FeatureSet] = {}
    with tqdm(cells(), unit="run", disable=None) as bar:
        for cell in bar:
            bar.set_postfix_str(f"{cell.task}, {cell.shot}-shot, {cell.head}", refresh=True)
            if cell.task not in features:
                features[cell.task] = novel_features(cell.task, arguments, device)
            results[cell] = result_of(cell, features[cell.task], arguments, device)
    figures = arguments.out.parent / "docs" / "results"
    draw(results, figures)
    text = page(results, features, arguments, figures.relative_to(arguments.out.parent))
    with atomic_path(arguments.out) as temporary:
        temporary.write_text(text)
    print(text)


def novel_features(task: str, arguments: argparse.Namespace, device: torch.device) -> FeatureSet:
    """Of all pictures of the novel classes; kept in --work for these weights."""
    name, dataset = TASKS[task]
    backbone = load_backbone(name)
    path = arguments.work / f"{dataset}-{name}-{backbone.identity[:12]}.npz"
    if not path.exists():
        split = open_split(dataset, "novel", arguments.data_root)
        rows = extract_features(backbone, load_pixels(split, backbone.resize), device=device)
        card = {"backbone": backbone.card, "dataset": dataset, "split": "novel", "images": len(rows)}
        FeatureSet(rows, split.labels, split.class_names, card).save(path)
    features = FeatureSet.load(path)
    return replace(features, card={**features.card, "backbone": backbone.card})  # maybe newer


def result_of(
    cell: Cell, features: FeatureSet, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The summary of a head with its accuracy in every episode, run now or read from --work."""
    head = head_for(cell.head, features.card["backbone"])
    identity = {
        "features": features.checksum,
        "episodes": arguments.episodes,
        "seed": arguments.seed,
        "parameters": head.get_params(),
    }
    path = arguments.work / cell.file
    if path.exists():
        saved: dict[str, Any] = json.loads(path.read_text())
        if saved["identity"] == identity:
            return saved
    sampler = EpisodeSampler(features, way=cell.way, shot=cell.shot, query=16, seed=arguments.seed)
    found = evaluate(
        {cell.head: head}, features, sampler, arguments.episodes, unseen=cell.way < 20, device=device
    )[cell.head]
    result = {"identity": identity, **summary_of(found)}
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(result))
    return result


def summary_of(found: HeadResult) -> dict[str, Any]:
    return {**found.summary(), "per_episode": found.accuracy.tolist()}


def page(
    results: dict[Cell, dict[str, Any]],
    features: dict[str, FeatureSet],
    arguments: argparse.Namespace,
    figures: Path,
) -> str:
    lines = [
        "# Results",
        "",
        f"Every head on the same {arguments.episodes} episodes (seed {arguments.seed}, 16 queries per class) "
        "of all pictures of the",
        "novel classes, features of the shipped Conv-4 backbones. Accuracy in percent, 95 % interval.",
        "Printed by",
        "",
        f"    python scripts/make_results.py --work runs/results --episodes {arguments.episodes} "
        f"--seed {arguments.seed}",
        "",
        "`dpkl` is the paper's model, `dpkl-calibrated` the one of this toolkit "
        "([docs/calibration.md](docs/calibration.md)).",
    ]
    for shot in (5, 1):
        lines += ["", f"## 5-way {shot}-shot"]
        for task in TASKS:
            lines += ["", f"**{task}** ({describe(features[task])})", ""]
            lines += main_table(results, task, shot)
    lines += ["", "## Shots and ways", "", "Accuracy / NLL / ECE.", ""]
    for task in TASKS:
        lines += ["", f"**{task}**", "", *sweep_table(results, task)]
    lines += ["", f"![Reliability]({figures}/reliability.png)", "", f"![Shots]({figures}/shots.png)", ""]
    return "\n".join(lines)


def describe(features: FeatureSet) -> str:
    card = features.card["backbone"]
    return (
        f"{card.get('name', card['backbone'])}, {len(features.labels)} pictures of "
        f"{len(features.class_names)} classes"
    )


def main_table(results: dict[Cell, dict[str, Any]], task: str, shot: int) -> list[str]:
    """One row per head; the difference to 1-NN is paired by episode."""
    first = np.array(results[Cell(task, 5, shot, "nn")]["per_episode"])
    paper = PAPER.get(task, {}) if shot == 5 else {}
    head_row = "| head | accuracy | over 1-NN | NLL | ECE | Brier | at 80 % | unseen AUROC |"
    rows = [head_row + (" paper |" if paper else ""), "|---" * (8 + bool(paper)) + "|"]
    for head in COMPARED:
        found = results[Cell(task, 5, shot, head)]
        gain, interval = mean_interval(np.array(found["per_episode"]) - first)
        rows.append(
            f"| {head} | {100 * found['accuracy']:.2f} ± {100 * found['ci95']:.2f} "
            f"| {100 * gain:+.2f} ± {100 * interval:.2f} | {found['nll']:.3f} | {found['ece']:.3f} "
            f"| {found['brier']:.3f} | {100 * found['accuracy_at_80']:.1f} | {found['unseen_auroc']:.3f} |"
            + (f" {paper.get(head, '')} |" if paper else "")
        )
    return rows


def sweep_table(results: dict[Cell, dict[str, Any]], task: str) -> list[str]:
    settings = [(5, shot) for shot in SHOTS] + [(way, 5) for way in WAYS[1:]]
    rows = [
        "| head | " + " | ".join(f"{way}-way {shot}-shot" for way, shot in settings) + " |",
        "|---" * (len(settings) + 1) + "|",
    ]
    for head in FAST:
        texts = []
        for way, shot in settings:
            found = results[Cell(task, way, shot, head)]
            texts.append(f"{100 * found['accuracy']:.1f} / {found['nll']:.2f} / {found['ece']:.3f}")
        rows.append(f"| {head} | " + " | ".join(texts) + " |")
    return rows


def draw(results: dict[Cell, dict[str, Any]], folder: Path) -> None:
    """Reliability diagrams and accuracy against shots, as PNG."""
    shown = ("logreg", "dpkl", "dpkl-calibrated")
    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for head in shown:
            bins = {key: np.array(v) for key, v in results[Cell(task, 5, 5, head)]["reliability"].items()}
            full = bins["count"] >= 20
            confidence, right = (bins[key][full] / bins["count"][full] for key in ("confidence", "right"))
            axis.plot(confidence, right, marker="o", markersize=3, label=head)
        axis.set(title=task, xlabel="top probability", xlim=(0.2, 1), ylim=(0, 1))
    axes[0].set_ylabel("share of right answers")
    axes[0].legend(frameon=False)
    _save(figure, folder / "reliability.png")
    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 3.6), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        for head in FAST:
            accuracy = [100 * results[Cell(task, 5, shot, head)]["accuracy"] for shot in SHOTS]
            axis.plot(SHOTS, accuracy, marker="o", markersize=3, label=head)
        axis.set(title=task, xlabel="examples per class", xscale="log", xticks=SHOTS, xticklabels=SHOTS)
        axis.minorticks_off()
    axes[0].set_ylabel("accuracy %, 5-way")
    axes[0].legend(frameon=False)
    _save(figure, folder / "shots.png")


def _save(figure: Any, path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run(main)
