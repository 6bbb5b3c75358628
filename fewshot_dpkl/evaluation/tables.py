"""Tables for a terminal, a README and a paper: rows of text, the first of them the headings."""

from __future__ import annotations

from collections.abc import Sequence

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
