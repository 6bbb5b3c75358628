"""Tables for a terminal, a README and a paper: rows of text, the first of them the headings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Sequence[str]]

LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "−": "$-$"}
)


def aligned(rows: Rows) -> str:
    """Rows as lines: the first column to the left, the others to the right of their widest cell.

    Examples:
        >>> print(aligned([["head", "accuracy %"], ["nn", "62.68"]]))
        head  accuracy %
        nn         62.68
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )
    return "\n".join(lines)


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table.

    >>> print(markdown([["head", "accuracy"], ["nn", "62.68"]]))
    | head | accuracy |
    | --- | --- |
    | nn | 62.68 |
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def latex(rows: Rows) -> str:
    """Rows as a LaTeX table, with the rules of the package booktabs.

    >>> print(latex([["head", "accuracy %"], ["nn", "62.68 ± 0.64"]]))
    \\begin{tabular}{lr}
    \\toprule
    head & accuracy \\% \\\\
    \\midrule
    nn & 62.68 $\\pm$ 0.64 \\\\
    \\bottomrule
    \\end{tabular}
    """
    lines = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in rows]
    body = "\n".join(["\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}\n{body}\n\\end{{tabular}}"


FORMATS = {"plain": aligned, "markdown": markdown, "latex": latex}


def unseen_rows(summaries: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """How queries of unseen classes are told, by head: by its top probability, then by its unfamiliarity."""
    rows = [["unseen queries", "unseen AUROC", "FPR at 95 %", "by unfamiliarity", "FPR at 95 %", "refused"]]
    for head, figures in summaries.items():
        row = [head]
        for kind in ("unseen", "unfamiliar"):
            auroc, fpr = figures.get(f"{kind}_auroc"), figures.get(f"{kind}_fpr95")
            row.append("-" if auroc is None else f"{auroc:.3f} ± {figures[f'{kind}_auroc_ci95']:.3f}")
            row.append("-" if fpr is None else f"{100 * fpr:.1f} %")
        rows.append([*row, f"{100 * figures['refused']:.1f} %" if "refused" in figures else "-"])
    return rows
