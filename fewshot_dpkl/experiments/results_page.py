"""Every head in every setting as one page: the tables and pictures of RESULTS.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fewshot_dpkl.evaluation.figures import plt, save_figure
from fewshot_dpkl.evaluation.metrics import mean_interval
from fewshot_dpkl.evaluation.tables import markdown
from fewshot_dpkl.heads import HEADS

PAPER = {  # table 1: task, head
    "mini-ImageNet": {"nn": "61.93 ± 0.65", "dblr": "60.12 ± 0.63", "dpkl": "64.96 ± 0.62"},
    "CUB": {"nn": "68.94 ± 0.74", "dblr": "68.48 ± 0.71", "dpkl": "69.11 ± 0.72"},
}
PUBLISHED = [  # of a Conv-4 with 64 channels, inductive, 5-way: task, method, 1 shot, 5 shots, source, remark
    ("mini-ImageNet", "CC + rotation", "54.8", "71.9", "Gidaris et al., 2019", ""),
    ("mini-ImageNet", "FEAT", "55.2", "71.6", "Ye et al., 2020", "attention over the task"),
    ("mini-ImageNet", "IEPT", "56.3", "73.9", "Zhang et al., 2021", ""),
    ("mini-ImageNet", "MCL-Katz", "57.9", "74.0", "Liu et al., 2022", "a pyramid of crops"),
    ("mini-ImageNet", "ConstellationNet", "59.7", "76.0", "Xu et al., 2021", "attention inside the network"),
    ("CUB", "ProtoNet", "58.9", "80.8", "mmfewshot's model zoo", ""),
    ("CUB", "negative margin", "64.1", "80.7", "mmfewshot's model zoo", ""),
    ("CUB", "RelationNet", "65.5", "82.1", "mmfewshot's model zoo", ""),
]
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


Results = Mapping[Cell, Mapping[str, Any]]
"""`HeadResult.summary()` of every cell, and its accuracies as `per_episode`."""


def cells(tasks: Sequence[str]) -> list[Cell]:
    """All heads at 5 shots and at 1; the fast ones over shots and ways."""
    found = [Cell(task, 5, shot, head) for shot in (5, 1) for task in tasks for head in COMPARED]
    for task in tasks:
        found += [Cell(task, 5, shot, head) for shot in SHOTS for head in FAST]
        found += [Cell(task, way, 5, head) for way in WAYS for head in FAST]
    return list(dict.fromkeys(found))


def page(
    results: Results, tasks: Mapping[str, str], figures: Path, *, episodes: int, seed: int, command: str
) -> str:
    """The page in Markdown; `tasks` are titles with a description, `figures` the folder of the pictures."""
    lines = [
        "# Results",
        "",
        f"Every head on the same {episodes} episodes (seed {seed}, 16 queries per class) of all pictures of",
        "the novel classes, features of the shipped Conv-4 backbones. Accuracy in percent, 95 % interval.",
        "Printed by",
        "",
        f"    {command}",
        "",
        "`dpkl` is the paper's model, `dpkl-calibrated` the one of this toolkit "
        "([docs/calibration.md](docs/calibration.md)).",
        "Unseen AUROC: how well the top probability tells a query of a class outside the episode,",
        "behind the comma how well the head's unfamiliarity does.",
    ]
    for shot in (5, 1):
        lines += ["", f"## 5-way {shot}-shot"]
        for task, description in tasks.items():
            lines += ["", f"**{task}** ({description})", "", main_table(results, task, shot)]
        lines += [
            "",
            "Accuracy against the rivals, paired by episode, and who has the best probabilities:",
            "",
        ]
        lines.append(rival_table(results, list(tasks), shot))
    lines += ["", "## Shots and ways", "", "Accuracy / NLL / ECE."]
    for task in tasks:
        lines += ["", f"**{task}**", "", sweep_table(results, task)]
    lines += [
        "",
        "## Beside published figures",
        "",
        published_table(results, list(tasks)),
        "",
        NOT_COMPARABLE,
    ]
    lines += ["", f"![Reliability]({figures}/reliability.png)", "", f"![Shots]({figures}/shots.png)", ""]
    return "\n".join(lines)


NOT_COMPARABLE = """\
Not comparable, and left out: CUB cut to its bounding boxes, networks of more than 64 channels (up to 512),
and queries seen together. Our pictures of CUB have a shorter side of 96 pixels."""


def published_table(results: Results, tasks: Sequence[str]) -> str:
    """The best inductive head at each number of shots, among published figures of a Conv-4."""
    rows = [["data set", "method", "1 shot", "5 shots", "source", "remark"]]
    for task in dict.fromkeys(row[0] for row in PUBLISHED if row[0] in tasks):
        rows += [list(row) for row in PUBLISHED if row[0] == task]
        best = [max((results[Cell(task, 5, s, head)]["accuracy"], head) for head in COMPARED) for s in (1, 5)]
        ours = [f"**{100 * accuracy:.1f}** ({head})" for accuracy, head in best]
        rows.append([task, "the best of our heads", *ours, "above", ""])
    return markdown(rows)


def difference(results: Results, cell: Cell, other: Cell) -> str:
    """Accuracy of `cell` minus that of `other` on the same episodes, in points."""
    mine, theirs = (np.array(results[one]["per_episode"]) for one in (cell, other))
    gain, interval = mean_interval(mine - theirs)
    return f"{100 * gain:+.2f} ± {100 * interval:.2f}"


def main_table(results: Results, task: str, shot: int) -> str:
    """One row per head; the difference to 1-NN is paired by episode."""
    paper = PAPER.get(task, {}) if shot == 5 else {}
    columns = ["head", "accuracy", "over 1-NN", "NLL", "ECE", "Brier", "at 80 %", "entropy right / wrong"]
    columns += ["unseen AUROC"] + ["paper"] * bool(paper)
    rows = []
    for head in COMPARED:
        cell = Cell(task, 5, shot, head)
        found = results[cell]
        row = [head, f"{100 * found['accuracy']:.2f} ± {100 * found['ci95']:.2f}"]
        row += [difference(results, cell, Cell(task, 5, shot, "nn"))]
        row += [f"{found[figure]:.3f}" for figure in ("nll", "ece", "brier")]
        row += [f"{100 * found['accuracy_at_80']:.1f}"]
        row += [f"{found['entropy_right']:.2f} / {found['entropy_wrong']:.2f}"]
        unfamiliar = found.get("unfamiliar_auroc")
        row += [f"{found['unseen_auroc']:.3f}" + (f", {unfamiliar:.3f}" if unfamiliar else "")]
        row += [paper.get(head, "")] * bool(paper)
        rows.append(row)
    return markdown([columns, *rows])


def rival_table(results: Results, tasks: Sequence[str], shot: int) -> str:
    """DPKL against 1-NN and DBLR, the calibrated preset against the best of the others."""
    rows = []
    for task in tasks:
        of_head = {head: Cell(task, 5, shot, head) for head in COMPARED}
        others = [head for head in COMPARED if head != "dpkl-calibrated"]
        best = max(others, key=lambda head: results[of_head[head]]["accuracy"])
        row = [task, *(difference(results, of_head["dpkl"], of_head[head]) for head in ("nn", "dblr"))]
        row += [f"{difference(results, of_head['dpkl-calibrated'], of_head[best])} ({best})"]
        for figure in ("nll", "ece"):
            first = sorted(COMPARED, key=lambda head: results[of_head[head]][figure])[:2]
            row += [", ".join(f"{head} {results[of_head[head]][figure]:.3f}" for head in first)]
        rows.append(row)
    of_calibrated = "dpkl-calibrated − the most accurate other"
    columns = ["", "dpkl − nn", "dpkl − dblr", of_calibrated, "two best NLL", "two best ECE"]
    return markdown([columns, *rows])


def sweep_table(results: Results, task: str) -> str:
    settings = [(5, shot) for shot in SHOTS] + [(way, 5) for way in WAYS[1:]]
    rows = []
    for head in FAST:
        found = [results[Cell(task, way, shot, head)] for way, shot in settings]
        rows.append(
            [head, *(f"{100 * one['accuracy']:.1f} / {one['nll']:.2f} / {one['ece']:.3f}" for one in found)]
        )
    return markdown([["head", *(f"{way}-way {shot}-shot" for way, shot in settings)], *rows])


def draw(results: Results, tasks: Sequence[str], folder: Path) -> None:
    """Reliability diagrams and accuracy against shots, as PNG."""
    shown = ("logreg", "dpkl", "dpkl-calibrated")
    figure, axes = plt.subplots(1, len(tasks), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, task in zip(axes, tasks, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for head in shown:
            bins = {key: np.array(v) for key, v in results[Cell(task, 5, 5, head)]["reliability"].items()}
            full = bins["count"] >= 20
            confidence, right = (bins[key][full] / bins["count"][full] for key in ("confidence", "right"))
            axis.plot(confidence, right, marker="o", markersize=3, label=head)
        axis.set(title=task, xlabel="top probability", xlim=(0.2, 1), ylim=(0, 1))
    axes[0].set_ylabel("share of right answers")
    axes[0].legend(frameon=False)
    save_figure(figure, folder / "reliability", kinds=("png",))
    figure, axes = plt.subplots(1, len(tasks), figsize=(11, 3.6), layout="constrained")
    for axis, task in zip(axes, tasks, strict=True):
        for head in FAST:
            accuracy = [100 * results[Cell(task, 5, shot, head)]["accuracy"] for shot in SHOTS]
            axis.plot(SHOTS, accuracy, marker="o", markersize=3, label=head)
        axis.set(title=task, xlabel="examples per class", xscale="log", xticks=SHOTS, xticklabels=SHOTS)
        axis.minorticks_off()
    axes[0].set_ylabel("accuracy %, 5-way")
    axes[0].legend(frameon=False)
    save_figure(figure, folder / "shots", kinds=("png",))
