"""The page of an evaluation: one HTML file with tables and pictures, drawn from its results alone.

    import json
    from fewshot_dpkl.evaluation.report import report
    html = report(json.load(open("runs/table1/results.json")))

The page needs no script, no network and no other file. Every text goes through `escape` in `tables`
or `pictures`; everything else that is put together is numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fewshot_dpkl.evaluation.report.pictures import (
    COLOURS,
    accuracy_picture,
    legend,
    reliability_picture,
    sweep_picture,
)
from fewshot_dpkl.evaluation.report.tables import NO_BREAK, Cell, accuracy_cell, number, paragraph, table

HARDEST = 10  # classes shown
STYLE = Path(__file__).with_name("style.css").read_text("utf-8") + "".join(
    f".s{i} {{ --c: var(--c{i}); }}\n" for i in range(COLOURS)
)

# Columns of the table of heads: figure, heading, factor, decimals, which end is better.
FIGURES = (
    ("accuracy", "accuracy %", 100, 2, max),
    ("nll", "NLL", 1, 4, min),
    ("ece", "ECE", 1, 4, min),
    ("brier", "Brier", 1, 4, min),
    ("accuracy_at_80", "accuracy % at 80 %", 100, 2, max),
    ("entropy_right", "entropy, right", 1, 3, None),
    ("entropy_wrong", "entropy, wrong", 1, 3, None),
    ("unseen_auroc", "unseen AUROC", 1, 3, max),
    ("seconds", "seconds", 1, 1, None),
)

MEANINGS = {
    "accuracy": "share of right answers, mean over episodes ± 1.96 σ / √episodes",
    "NLL": "mean negative log-probability of the true class, in nats",
    "ECE": "distance between confidence and accuracy, over 15 equal bins of the top probability, all queries",
    "Brier": "squared distance between the probabilities and the truth, summed over classes",
    "accuracy at 80 %": "accuracy on the 80 % of an episode's queries with the highest top probability",
    "entropy": "mean entropy in nats of the probabilities behind right and behind wrong answers",
    "unseen AUROC": "chance that a query of the episode has a higher top probability than one from outside",
    "seconds": "wall-clock time of the head on all episodes",
}


def report(results: Mapping[str, Any]) -> str:
    """Results, as `results.json` holds them, to a page."""
    settings, heads = results["settings"], results["heads"]
    title = f"{settings['way']}-way {settings['shot']}-shot evaluation"
    sections = [
        section("Heads", accuracy_picture(heads), head_table(heads), meanings()),
        section("Paired differences", *differences(results.get("paired", []), list(heads))),
        section("Reliability", *reliability(heads)),
        *(sweep_section(name, runs) for name, runs in results.get("sweeps", {}).items()),
        section("Hardest classes", *hardest(results.get("classes", []), heads)),
        section("How it was made", *origin(results)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{lead(results)}\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A heading and what stands under it; nothing if that is empty."""
    body = "\n".join(filter(None, parts))
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>\n" if body else ""


def lead(results: Mapping[str, Any]) -> str:
    settings, card = results["settings"], results.get("features", {})
    backbone = card.get("backbone")
    if isinstance(backbone, Mapping):
        backbone = backbone.get("name") or backbone.get("backbone")
    origin = [card.get("dataset"), card.get("split"), backbone]
    return paragraph(
        f"{settings['episodes']} episodes, {settings['query']} queries per class, seed {settings['seed']}. "
        + (f"Features: {', '.join(str(part) for part in origin if part)}." if any(origin) else ""),
        "lead",
    )


def head_table(heads: Mapping[str, Any]) -> str:
    shown = [column for column in FIGURES if any(column[0] in figures for figures in heads.values())]
    best = {}
    for key, _, _, _, better in shown:
        values = [f[key] for f in heads.values() if f.get(key) is not None]
        best[key] = better(values) if better and values and len(heads) > 1 else None
    rows = []
    for name, figures in heads.items():
        row = [Cell(name)]
        for key, _, factor, decimals, _ in shown:
            interval = figures.get("ci95" if key == "accuracy" else f"{key}_ci95")
            interval = None if key in ("nll", "brier") else interval  # keeps the table narrow
            value = figures.get(key)
            css = "best" if value is not None and value == best[key] else ""
            row.append(Cell(number(value, factor, decimals, interval), css))
        rows.append(row)
    return table(["head", *(heading for _, heading, *_ in shown)], rows, "Bold: the best of its column.")


def meanings() -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in MEANINGS.items())
    return f"<details><summary>What the figures mean</summary><dl>{items}</dl></details>"


def differences(pairs: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> list[str]:
    """Matrices of row minus column, in accuracy and in NLL."""
    if not pairs:
        return []
    parts = [
        paragraph(
            "Row minus column on the same episodes, with the 95 % interval of the mean difference. Coloured "
            "where the interval excludes zero: green and ▲ where the row is better, red and ▼ where it is "
            "worse."
        )
    ]
    found = {(pair["head"], pair["minus"]): pair for pair in pairs}
    for figure, caption, factor, decimals, better in (
        ("accuracy", "Accuracy, percentage points", 100, 2, 1),
        ("nll", "NLL, nats (lower is better)", 1, 3, -1),
    ):
        rows = []
        for head in heads:
            row = [Cell(head)]
            for other in heads:
                sign = 1 if (head, other) in found else -1
                pair = found.get((head, other)) or found.get((other, head))
                if pair is None:
                    row.append(Cell("", "none"))
                    continue
                value, interval = sign * pair[figure], pair[f"{figure}_ci95"]
                clear = 0 if abs(value) <= interval else better * math.copysign(1, value)
                mark, css = {0: ("", ""), 1: (f"▲{NO_BREAK}", "win"), -1: (f"▼{NO_BREAK}", "lose")}[
                    int(clear)
                ]
                text = mark + number(value, factor, decimals, interval, sign="+")
                row.append(Cell(text, f"pair {css}"))
            rows.append(row)
        parts.append(table(["minus", *heads], rows, caption))
    return parts


def reliability(heads: Mapping[str, Any]) -> list[str]:
    drawn = {name: figures for name, figures in heads.items() if "reliability" in figures}
    if not drawn:
        return []
    pictures = [
        f"<figure>{reliability_picture(name, figures, series)}"
        f"<figcaption>{escape(name)}, ECE {number(figures['ece'], 1, 3)}</figcaption></figure>"
        for series, (name, figures) in enumerate(drawn.items())
    ]
    text = (
        "Accuracy of the answers by their top probability: bars below the diagonal are too sure, bars above "
        "it not sure enough. Below, the share of queries in each bin."
    )
    return [paragraph(text), f'<div class="grid">{"".join(pictures)}</div>']


def sweep_section(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy against shot or way: a picture, its legend and its numbers."""
    heads = list(runs[0]["heads"])
    rows = [[Cell(head), *(accuracy_cell(run["heads"][head]) for run in runs)] for head in heads]
    other = "way" if name == "shot" else "shot"
    columns = ["head", *(f"{run[name]}-{name}" for run in runs)]
    numbers = table(columns, rows, f"Accuracy %, {runs[0][other]}-{other}")
    picture = f"<div>{sweep_picture(name, runs)}{legend(heads)}</div>"
    return section(f"Accuracy against {name}", f'<div class="beside">{picture}{numbers}</div>')


def hardest(classes: Sequence[Mapping[str, Any]], heads: Mapping[str, Any]) -> list[str]:
    if not classes:
        return []
    leader = max(heads, key=lambda name: heads[name]["accuracy"])
    order = sorted(classes, key=lambda row: sum(row["accuracy"].values()))[:HARDEST]
    rows = []
    for row in order:
        taken = row["taken_for"].get(leader)
        answer = f"{taken['class']} ({100 * taken['share']:.0f} %)" if taken else "–"
        accuracies = [Cell(number(row["accuracy"].get(name), 100, 1)) for name in heads]
        rows.append([Cell(row["name"]), *accuracies, Cell(str(row["queries"])), Cell(answer, "text")])
    text = (
        f"Of {len(classes)} classes, those with the lowest accuracy (%) over all heads. The last column is "
        f"the wrong answer {leader} gives most often, and its share in the episodes that held both classes."
    )
    return [paragraph(text), table(["class", *heads, "queries", f"{leader} takes it for"], rows, "")]


def origin(results: Mapping[str, Any]) -> list[str]:
    """The command, the settings, the versions and the card of the features."""
    parts = []
    if results.get("command"):
        parts.append(f"<pre><code>{escape(str(results['command']))}</code></pre>")
    for key, heading in (("settings", "Settings"), ("versions", "Versions"), ("features", "Features")):
        if results.get(key):
            rows = [[Cell(name), Cell(value, "text")] for name, value in flat(results[key])]
            body = table(["name", "value"], rows, "")
            parts.append(f"<details><summary>{heading}</summary>{body}</details>")
    return parts


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested settings as dotted names and plain values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{key}", ", ".join(map(str, value)) or "–"
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)
