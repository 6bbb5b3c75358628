"""What heads say of query pictures: as a table for the reader, as CSV and JSON for programs."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads import DEFAULT_HEAD

NOT_SURE = "not sure"
NONE_OF_THESE = "none of these"
CAPPED = ("bnn", "dblr", "dpkl")
"""Heads whose probabilities cannot pass 1 / (1 + (C - 1) e⁻²): a softmax of cosines."""


@dataclass
class Answers:
    """What every head says of n query pictures.

    Attributes:
        names: n file names.
        truth: n classes, None where unknown.
        refused: why picture i has no answer.
        classes: C names.
        threshold: below this top probability the answer is "not sure".
        unknown: the share of known pictures that may be taken for "none of these"; None asks for none.
        probabilities: by head, `[n, C]`, NaN for refused pictures.
        unfamiliarity: by head, `[n]`, NaN for refused pictures; only where `unknown` is given.
    """

    names: list[str]
    truth: list[str | None]
    refused: dict[int, str]
    classes: list[str]
    threshold: float = 0.0
    unknown: float | None = None
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)
    unfamiliarity: dict[str, np.ndarray] = field(default_factory=dict)

    def top(self, head: str, index: int) -> tuple[str, float]:
        """The most probable class and its probability."""
        row = self.probabilities[head][index]
        return self.classes[int(row.argmax())], float(row.max())

    def label(self, head: str, index: int) -> str:
        """The class, "none of these" or "not sure"."""
        name, probability = self.top(head, index)
        if self.unknown is not None and self.unfamiliarity[head][index] > 1 - self.unknown:
            return NONE_OF_THESE
        return name if probability >= self.threshold else NOT_SURE

    def answered(self) -> list[int]:
        return [index for index in range(len(self.names)) if index not in self.refused]


def shown(name: str | os.PathLike[str]) -> str:
    """A file name that can be printed: no control characters, no bytes that are not text."""
    return "".join(letter if letter.isprintable() else "�" for letter in os.fspath(name))


def table(answers: Answers) -> str:
    """A line per picture with each head's answer, and accuracies where classes are known."""
    heads = list(answers.probabilities)
    folder, names = without_folder(answers.names)
    rows = [["picture", *heads]]
    for index, name in enumerate(names):
        if index in answers.refused:
            rows.append([name, *["-"] * len(heads)])
            continue
        cells = []
        for head in heads:
            label, probability = answers.label(head, index), answers.top(head, index)[1]
            if label == NONE_OF_THESE:
                cells.append(f"{label} (unfamiliar {answers.unfamiliarity[head][index]:.3f})")
            else:
                cells.append(f"{shown(label)} {probability:.3f}")
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    where = [f"in {folder}:"] if folder else []
    return "\n".join(where + lines + accuracy_lines(answers))


def without_folder(names: list[str]) -> tuple[str, list[str]]:
    """The folder that holds all files, empty for none, and the names below it."""
    try:
        folder = os.path.commonpath([os.path.dirname(name) for name in names])
    except ValueError:  # relative and absolute names
        return "", names
    return folder, [name.removeprefix(folder).lstrip(os.sep) for name in names] if folder else names


def accuracy_lines(answers: Answers) -> list[str]:
    known = [
        index
        for index, truth in enumerate(answers.truth)
        if truth is not None and index not in answers.refused
    ]
    lines = []
    for head in answers.probabilities if known else []:
        right = np.array([answers.top(head, index)[0] == answers.truth[index] for index in known])
        labels = np.array([answers.label(head, index) for index in known])
        line = f"accuracy of {head} on {len(known)} pictures of known class: {100 * right.mean():.1f} %"
        sure = ~np.isin(labels, (NOT_SURE, NONE_OF_THESE))
        if not sure.all():
            counts = [f"{name}: {n}" for name in (NOT_SURE, NONE_OF_THESE) if (n := (labels == name).sum())]
            of_sure = f", accuracy of the others: {100 * right[sure].mean():.1f} %" if sure.any() else ""
            line += f" ({', '.join(counts)}{of_sure})"
        lines.append(line)
    return ["", *lines] if lines else []


def hints(answers: Answers) -> list[str]:
    """What a reader of these answers should know: a threshold that refuses all, probabilities with a cap."""
    found, ways, asked = [], len(answers.classes), answers.answered()
    cap = 1 / (1 + (ways - 1) * np.exp(-2))
    for head in answers.probabilities if asked else []:
        labels = {answers.label(head, index) for index in asked}
        highest = max(answers.top(head, index)[1] for index in asked)
        better = "; lower it" if head not in CAPPED else f"; lower it, or use --head {DEFAULT_HEAD}"
        if labels == {NOT_SURE}:
            found.append(
                f"{head} is {NOT_SURE} of every picture: its highest probability is {highest:.3f}, the "
                f"threshold {answers.threshold:g}{better}"
            )
        elif labels == {NONE_OF_THESE}:
            found.append(
                f"{head} takes every picture for {NONE_OF_THESE}; lower --unknown {answers.unknown:g}, give "
                "more examples, or look whether these are pictures of the same kind"
            )
        if head in CAPPED:
            found.append(
                f"the probabilities of {head} cannot pass {cap:.2f} for {ways} classes, however sure it is; "
                f"--head {DEFAULT_HEAD} gives ones to trust"
            )
    return found


def write(path: Path, answers: Answers) -> None:
    """All probabilities: CSV with a row per picture and head, or JSON with an entry per picture."""
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(answers.names):
        about = {"picture": name, "class": answers.truth[index], "refused": answers.refused.get(index)}
        for head, probabilities in answers.probabilities.items():
            row: dict[str, Any] = {**about, "head": head, "label": None, "probability": None}
            if index not in answers.refused:
                row |= {"label": answers.label(head, index), "probability": answers.top(head, index)[1]}
                if answers.unknown is not None:
                    row["unfamiliarity"] = float(answers.unfamiliarity[head][index])
                row["probabilities"] = dict(zip(answers.classes, probabilities[index].tolist(), strict=True))
            rows.append(row)
    with atomic_path(path) as temporary:
        if path.suffix == ".json":
            asked = {"threshold": answers.threshold, "unknown": answers.unknown}
            document = {"classes": answers.classes, **asked, "answers": rows}
            temporary.write_text(json.dumps(document, indent=1) + "\n")
            return
        columns = {name: f"p({name})" for name in answers.classes}
        # names of folders may hold bytes that are not text
        with temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            first = ["picture", "class", "refused", "head", "label", "probability"]
            first += ["unfamiliarity"] if answers.unknown is not None else []
            writer = csv.DictWriter(file, [*first, *columns.values()])
            writer.writeheader()
            for row in rows:
                each = row.pop("probabilities", {})
                writer.writerow({**row, **{columns[name]: value for name, value in each.items()}})
