"""The page of an evaluation: one HTML file with tables and pictures, drawn from its results alone.

    import json
    from fewshot_dpkl.evaluation.report import report
    html = report(json.load(open("runs/table1/results.json")))

The page needs no script, no network and no other file. Every text goes through `escape` in `cell`, `label` or
`paragraph`; everything else that is put together here is numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

HARDEST = 10  # classes shown
NO_BREAK = "\u00a0"  # a space at which no line ends

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


# Sections


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


# Text and tables


class Cell(NamedTuple):
    text: str
    css: str = ""


def paragraph(text: str, css: str = "") -> str:
    return f'<p class="{css}">{escape(text)}</p>' if css else f"<p>{escape(text)}</p>"


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str) -> str:
    """A table that scrolls in its own box; the first cell of a row is its heading."""
    styles = ['class="text"' if content.css == "text" else "" for content in rows[0]]
    head = "".join(
        f'<th scope="col" {css}>{escape(heading)}</th>' for heading, css in zip(headings, styles, strict=True)
    )
    body = "".join(f"<tr>{''.join(cell(c, i == 0) for i, c in enumerate(row))}</tr>\n" for row in rows)
    about = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table>{about}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def cell(content: Cell, heading: bool) -> str:
    css = f' class="{content.css}"' if content.css else ""
    if heading:
        return f'<th scope="row"{css}>{escape(content.text)}</th>'
    return f"<td{css}>{escape(content.text)}</td>"


def number(
    value: float | None, factor: float, decimals: int, interval: float | None = None, sign: str = ""
) -> str:
    """A figure, with ± its interval if it has one; a line may break between the two."""
    if value is None:
        return "–"
    plus_minus = "" if interval is None else f" ±{NO_BREAK}{factor * interval:.{decimals}f}"
    return f"{factor * value:{sign}.{decimals}f}".replace("-", "−") + plus_minus


def accuracy_cell(figures: Mapping[str, Any]) -> Cell:
    return Cell(number(figures["accuracy"], 100, 2, figures["ci95"]))


def legend(names: Sequence[str]) -> str:
    items = (f'<li class="s{i % COLOURS}"><i></i>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend" aria-hidden="true">{"".join(items)}</ul>'


# Pictures: 360 units wide, the width of a phone, so that their letters keep their size there

COLOURS = 8
Scale = Callable[[float], float]


def accuracy_picture(heads: Mapping[str, Any]) -> str:
    """A row for each head: a dot at its accuracy, a line over its interval."""
    left = 16 + 7 * max(map(len, heads))
    bottom = 8 + 26 * len(heads)
    spans = [(100 * (f["accuracy"] - f["ci95"]), 100 * (f["accuracy"] + f["ci95"])) for f in heads.values()]
    marks = ticks(min(low for low, _ in spans), max(high for _, high in spans), 5)
    x = scale(marks[0], marks[-1], left, 344)
    body = [line(x(mark), 4, x(mark), bottom, "grid-line") for mark in marks]
    body += [label(x(mark), bottom + 16, f"{mark:g}", "middle") for mark in marks]
    for i, ((name, figures), (low, high)) in enumerate(zip(heads.items(), spans, strict=True)):
        y = 21 + 26 * i
        body.append(label(left - 10, y + 4, name, "end"))
        point = f'<circle cx="{x(100 * figures["accuracy"]):.1f}" cy="{y}" r="4.5"/>'
        body.append(f'<g class="s{i % COLOURS}">{line(x(low), y, x(high), y, "whisker")}{point}</g>')
    body.append(label((left + 344) / 2, bottom + 34, "accuracy %, 95 % interval", "middle"))
    values = (f"{name} {number(f['accuracy'], 100, 2, f['ci95'])}" for name, f in heads.items())
    return svg(360, bottom + 42, "Accuracy of each head", "; ".join(values), body)


def reliability_picture(name: str, figures: Mapping[str, Any], series: int) -> str:
    """Bars of accuracy by confidence over a strip with the share of queries."""
    bins = figures["reliability"]
    size, left, top = 140, 32, 6
    x, y = scale(0, 1, left, left + size), scale(0, 1, top + size, top)
    strip = y(0) + 34
    total, most = sum(bins["count"]), max(bins["count"])
    width = size / len(bins["count"])
    bars = []
    for i, (count, right) in enumerate(zip(bins["count"], bins["right"], strict=True)):
        if count:
            bars.append(bar(left + i * width, y(right / count), width, y(0)))
            bars.append(bar(left + i * width, strip - 26 * count / most, width, strip, "share"))
    body = [f'<g class="s{series % COLOURS}">{"".join(bars)}</g>']
    body += [line(x(0), y(0), x(1), y(1), "diagonal"), line(x(0), y(0), x(1), y(0), "axis")]
    body += [line(x(0), y(0), x(0), y(1), "axis"), line(x(0), strip, x(1), strip, "axis")]
    for mark in (0, 50, 100):
        body.append(label(left - 5, y(mark / 100) + 4, str(mark), "end"))
        body.append(label(x(mark / 100), strip + 14, str(mark), "middle"))
    body.append(label(x(0.5), strip + 28, "top probability %", "middle"))
    confidence, right = sum(bins["confidence"]) / total, sum(bins["right"]) / total
    about = f"mean top probability {100 * confidence:.1f} %, accuracy {100 * right:.1f} %"
    return svg(184, strip + 34, f"Reliability of {name}", about, body)


def sweep_picture(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """A line for each head through its accuracies, values of the sweep at equal distances."""
    heads = list(runs[0]["heads"])
    figures = [run["heads"][head] for run in runs for head in heads]
    marks = ticks(
        min(100 * (f["accuracy"] - f["ci95"]) for f in figures),
        max(100 * (f["accuracy"] + f["ci95"]) for f in figures),
        8,
    )
    left, right, top, bottom = 40, 344, 10, 210
    y = scale(marks[0], marks[-1], bottom, top)
    step = (right - left) / len(runs)
    body = [line(left, y(mark), right, y(mark), "grid-line") for mark in marks]
    body += [label(left - 6, y(mark) + 4, f"{mark:g}", "end") for mark in marks]
    places = [left + step * (i + 0.5) for i in range(len(runs))]
    body += [label(x, bottom + 18, str(run[name]), "middle") for x, run in zip(places, runs, strict=True)]
    for i, head in enumerate(heads):
        shift = 4 * (i - (len(heads) - 1) / 2)  # so that the intervals of heads do not hide each other
        group, points = "", []
        for x, run in zip(places, runs, strict=True):
            accuracy, interval = 100 * run["heads"][head]["accuracy"], 100 * run["heads"][head]["ci95"]
            points.append(f"{x + shift:.1f},{y(accuracy):.1f}")
            group += line(x + shift, y(accuracy - interval), x + shift, y(accuracy + interval), "whisker")
            group += f'<circle cx="{x + shift:.1f}" cy="{y(accuracy):.1f}" r="3.5"/>'
        group += f'<polyline points="{" ".join(points)}"/>'
        body.append(f'<g class="s{i % COLOURS}">{group}</g>')
    body.append(label((left + right) / 2, bottom + 38, f"{name} (accuracy %, 95 % interval)", "middle"))
    return svg(360, bottom + 46, f"Accuracy against {name}", "The table below holds the numbers.", body)


def svg(width: float, height: float, title: str, about: str, body: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(about)}</desc>{''.join(body)}</svg>"
    )


def label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def bar(x: float, top: float, width: float, bottom: float, css: str = "bar") -> str:
    return (
        f'<rect class="{css}" x="{x + 0.5:.1f}" y="{top:.1f}" width="{width - 1:.1f}" '
        f'height="{bottom - top:.1f}"/>'
    )


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """The straight map that takes low to start and high to end."""
    return lambda value: start + (end - start) * (value - low) / (high - low)


def ticks(low: float, high: float, steps: int) -> list[float]:
    """Round numbers at equal distances, about `steps` of them, from at most low to at least high."""
    width = max(high - low, 1e-6)
    power = 10.0 ** math.floor(math.log10(width / steps))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * steps >= width * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1e21; --soft: #5b626b; --line: #d7dbe0;
  --panel: #f4f6f8; --shade: #0003; --win: #d9f0dd; --lose: #fbe0dc;
  --c0: #0067a5; --c1: #c4500a; --c2: #00805c; --c3: #a8417c; --c4: #8a6d00; --c5: #2f8fc4; --c6: #6a43a8;
  --c7: #555c64; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e6e8eb; --soft: #a3abb5;
  --line: #373d45; --panel: #1f242a; --shade: #000c; --win: #1c4028; --lose: #54261f;
  --c0: #5fb2ec; --c1: #f08c4a; --c2: #3fc79a; --c3: #e58abf; --c4: #d9b93b; --c5: #9ad4f5; --c6: #b597ee;
  --c7: #b4bbc4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: .5rem 0; }
.lead, figcaption, caption, dd { color: var(--soft); }
.scroll { overflow-x: auto; margin: .8rem 0;  /* with a shadow where there is more to see */
  background: linear-gradient(to left, var(--page) 40%, transparent) right / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 1.2rem 100% no-repeat scroll; }
table { border-collapse: separate; border-spacing: 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .2rem 0; }
th, td { padding: .32rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
thead th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
tbody th { font-weight: 600; }
td.best { font-weight: 700; }
td.win { background: var(--win); }
td.lose { background: var(--lose); }
td.none { background: var(--panel); }
th.text, td.text { text-align: left; min-width: 11rem; overflow-wrap: anywhere; }
svg { display: block; width: 100%; max-width: 30rem; height: auto; }
svg text { font-size: 12px; fill: var(--soft); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem; }
.grid svg { max-width: 16rem; }
@media (min-width: 700px) { td { white-space: nowrap; } td.text, td.pair { white-space: normal; }
  .grid { grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); } }
.beside { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: center; }
.beside > div { min-width: 0; }
.beside > div:first-child { flex: 1 1 20rem; max-width: 30rem; }
figure { margin: 0; }
figcaption { font-size: .88rem; text-align: center; max-width: 16rem; }
.grid-line { stroke: var(--line); }
.axis { stroke: var(--soft); }
.diagonal { stroke: var(--ink); stroke-dasharray: 4 3; }
.whisker { stroke: var(--c); stroke-width: 2.5; }
circle, .bar, .share { fill: var(--c); }
.bar { opacity: .85; }
.share { opacity: .45; }
polyline { fill: none; stroke: var(--c); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: .4rem 0; padding: 0;
  font-size: .88rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 50%; margin-right: .35rem;
  background: var(--c); }
details { margin: .5rem 0; }
summary { cursor: pointer; }
dl { margin: .5rem 0; max-width: 44rem; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem; }
pre { background: var(--panel); padding: .7rem; border-radius: .4rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .85rem; }
""" + "".join(f".s{i} {{ --c: var(--c{i}); }}\n" for i in range(COLOURS))
