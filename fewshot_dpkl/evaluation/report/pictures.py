"""Pictures of the page: 360 units wide, the width of a phone, so that their letters keep their size there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fewshot_dpkl.evaluation.report.tables import number

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


def legend(names: Sequence[str]) -> str:
    items = (f'<li class="s{i % COLOURS}"><i></i>{escape(name)}</li>' for i, name in enumerate(names))
    return f'<ul class="legend" aria-hidden="true">{"".join(items)}</ul>'
