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

NOT_SURE = "not sure"


@dataclass
class Answers:
    """What every head says of n query pictures.

    Attributes:
        names: n file names.
        truth: n classes, None where unknown.
        refused: why picture i has no answer.
        classes: C names.
        probabilities: by head, `[n, C]`, NaN for refused pictures.
    """

    names: list[str]
    truth: list[str | None]
    refused: dict[int, str]
    classes: list[str]
    threshold: float
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)

    def top(self, head: str, index: int) -> tuple[str, float]:
        """The most probable class and its probability."""
        row = self.probabilities[head][index]
        return self.classes[int(row.argmax())], float(row.max())

    def label(self, head: str, index: int) -> str:
        name, probability = self.top(head, index)
        return name if probability >= self.threshold else NOT_SURE


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
            guess, probability = answers.top(head, index)
            sure = answers.label(head, index) != NOT_SURE
            cells.append(f"{shown(guess)} {probability:.3f}" if sure else f"{NOT_SURE} {probability:.3f}")
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
        sure = np.array([answers.label(head, index) != NOT_SURE for index in known])
        line = f"accuracy of {head} on {len(known)} pictures of known class: {100 * right.mean():.1f} %"
        if not sure.all():
            of_sure = f", accuracy of the others: {100 * right[sure].mean():.1f} %" if sure.any() else ""
            line += f" ({NOT_SURE}: {(~sure).sum()}{of_sure})"
        lines.append(line)
    return ["", *lines] if lines else []


def write(path: Path, answers: Answers) -> None:
    """All probabilities: CSV with a row per picture and head, or JSON with an entry per picture."""
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(answers.names):
        about = {"picture": name, "class": answers.truth[index], "refused": answers.refused.get(index)}
        for head, probabilities in answers.probabilities.items():
            row: dict[str, Any] = {**about, "head": head, "label": None, "probability": None}
            if index not in answers.refused:
                row |= {"label": answers.label(head, index), "probability": answers.top(head, index)[1]}
                row["probabilities"] = dict(zip(answers.classes, probabilities[index].tolist(), strict=True))
            rows.append(row)
    with atomic_path(path) as temporary:
        if path.suffix == ".json":
            document = {"classes": answers.classes, "threshold": answers.threshold, "answers": rows}
            temporary.write_text(json.dumps(document, indent=1) + "\n")
            return
        columns = {name: f"p({name})" for name in answers.classes}
        # names of folders may hold bytes that are not text
        with temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.DictWriter(file, [*list(rows[0])[:6], *columns.values()])
            writer.writeheader()
            for row in rows:
                each = row.pop("probabilities", {})
                writer.writerow({**row, **{columns[name]: value for name, value in each.items()}})
