"""The tables of the MNIST comparison."""

from __future__ import annotations

from fewshot_dpkl.evaluation.tables import markdown
from fewshot_dpkl.experiments.results import Results, deviation, spread

METRICS = ("error", "nll")
PAIRS = (
    ("dpkl", "dblr"),
    ("dpkl", "blr"),
    ("dblr", "blr"),
    ("bnn", "blr"),
    ("dpkl-lengthscale", "dpkl"),
    *((model, f"{model}-attract") for model in ("blr", "bnn", "dblr", "dpkl")),
)


def report(results: Results) -> str:
    """Means and deviations of every cell, and the differences that the paper's findings are about."""
    table = results.table(("error, %", "NLL"), (".2f", ".3f"))
    paired = paired_table(results)
    return f"{table}\n\nPaired by trial (mean ± standard error):\n\n{paired}\n" if paired else f"{table}\n"


def paired_table(results: Results) -> str:
    """Differences paired by trial, in how many trials the first is lower, and the share of NLL saved."""
    rows = [["pair", "n", "error difference, %", "lower in", "NLL difference", "lower in", "NLL saved"]]
    for first, second in PAIRS:
        for size in results.found_sizes:
            error, nll = (results.paired(first, second, size, metric) for metric in METRICS)
            if error is None or nll is None:
                continue
            row = [f"{first} - {second}", str(size)]
            for values, decimals in ((error, 2), (nll, 3)):
                interval = deviation(values) / len(values) ** 0.5
                row.append(spread(values, interval, f"+.{decimals}f"))
                row.append(f"{(values < 0).sum()}/{len(values)}")
            saved = -100 * nll.mean() / results.values(second, size, "nll").mean()
            rows.append([*row, f"{saved:.0f} %"])
    return markdown(rows) if len(rows) > 1 else ""
