"""Text, numbers and tables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

NO_BREAK = "\u00a0"  # a space at which no line ends


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
