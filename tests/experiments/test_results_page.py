"""The page of results: differences are paired, every head and setting has its place."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fewshot_dpkl.experiments.mnist.report import report
from fewshot_dpkl.experiments.results import Results, spread
from fewshot_dpkl.experiments.results_page import COMPARED, Cell, cells, draw, main_table, page, rival_table

TASKS = ("mini-ImageNet", "CUB")


@pytest.fixture
def results():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 0.1, 30)  # how hard an episode is, for all heads alike
    found = {}
    for cell in cells(TASKS):
        accuracy = 0.6 + 0.01 * len(cell.head) + hard + rng.normal(0, 0.01, 30)
        found[cell] = {
            "accuracy": accuracy.mean(),
            "ci95": 0.04,
            "nll": 1 / len(cell.head),
            "ece": 0.1 / len(cell.head),
            "brier": 0.5,
            "accuracy_at_80": 0.7,
            "entropy_right": 0.5,
            "entropy_wrong": 1.0,
            "unseen_auroc": 0.6,
            "per_episode": accuracy.tolist(),
            "reliability": {"count": [0, 50, 100], "confidence": [0, 25, 90], "right": [0, 20, 95]},
        }
    return found


def test_differences_are_those_of_a_paired_interval(results):
    mine, first = (np.array(results[Cell("CUB", 5, 5, head)]["per_episode"]) for head in ("dpkl", "nn"))
    interval = stats.ttest_rel(mine, first).confidence_interval(0.95)
    row = next(line for line in main_table(results, "CUB", 5).splitlines() if line.startswith("| dpkl |"))
    gain, width = (float(part) for part in row.split(" | ")[2].split(" ± "))
    assert gain == pytest.approx(100 * (mine - first).mean(), abs=0.006)
    assert width == pytest.approx(50 * (interval.high - interval.low), rel=0.06)


def test_the_rivals_are_named(results):
    row = rival_table(results, TASKS, 5).splitlines()[2]
    best = max(
        set(COMPARED) - {"dpkl-calibrated"}, key=lambda h: results[Cell(TASKS[0], 5, 5, h)]["accuracy"]
    )
    assert f"({best})" in row
    assert f"dpkl-calibrated {1 / 15:.3f}, centroid {1 / 8:.3f}" in row


def test_the_page_holds_every_head_and_the_figures_of_the_paper(results, tmp_path):
    tasks = dict.fromkeys(TASKS, "features of a test")
    text = page(results, tasks, tmp_path, episodes=30, seed=4, command="python this")
    for head in COMPARED:
        assert text.count(f"\n| {head} |") >= 4
    assert text.count("64.96 ± 0.62") == 1
    assert "30 episodes (seed 4" in text
    best = max((results[Cell("CUB", 5, 1, head)]["accuracy"], head) for head in COMPARED)
    assert f"| CUB | the best of our heads | **{100 * best[0]:.1f}** ({best[1]}) |" in text
    draw(results, TASKS, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"reliability.png", "shots.png"}


def test_a_single_trial_shows_no_deviation(tmp_path):
    results = Results(tmp_path, {"trials": 1}, ("error", "nll"), ("blr", "dpkl"))
    for model, error in (("blr", 12.0), ("dpkl", 11.0)):
        results.add([{"model": model, "size": 50, "trial": 0, "error": error, "nll": 0.5}])
    text = report(results)
    assert "| 50 | blr | 12.00 | 0.500 |" in text
    assert "-1.00 | 1/1" in text
    assert "± 0.0" not in text
    results.add([{"model": "bnn", "size": 50, "trial": t, "error": t, "nll": 0.5} for t in (1.0, 3.0)])
    assert spread(results.values("bnn", 50, "error"), 1.414, ".2f", "**") == "**2.00** ± 1.41"
