"""The UCI comparison: reading, splitting, cells, and scripts/run_uci.py as a user runs it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fewshot_dpkl.data.uci import SOURCES, TrialSplit, read_csv, read_uci, split_trials
from fewshot_dpkl.experiments.uci.sweep import MODELS, Cell, Results, run_cell, trial_tensors
from tests.conftest import ROOT, assert_refused


def toy(rows=160, columns=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * [1, 100, 0.01][:columns] + 5
    return x, 3 * np.sin(x[:, 0]) + rng.normal(size=rows)


def cell(model="dpkl", size=20, trials=2, **changes) -> Cell:
    x, y = toy()
    split = split_trials(len(x), size, trials, unlabelled=30, test=50)
    rows = (split.test, split.training, split.labelled, split.unlabelled)
    return replace(Cell("toy", model, size, x, y, *rows), **changes)


@pytest.fixture
def folder(tmp_path):
    x, y = toy()
    (tmp_path / "uci" / "toy").mkdir(parents=True)
    np.save(tmp_path / "uci" / "toy" / "X.npy", x.astype(np.float32))
    np.save(tmp_path / "uci" / "toy" / "y.npy", y.astype(np.float32)[:, None])
    return tmp_path


@pytest.fixture
def script(run_script):
    return lambda *arguments: run_script("run_uci.py", *arguments)


def test_splits_are_disjoint_nested_and_seeded():
    small = split_trials(300, 20, 3, unlabelled=100, test=50, seed=4)
    large = split_trials(300, 40, 5, unlabelled=1000, test=50, seed=4)
    assert np.array_equal(small.test, large.test)
    assert np.array_equal(small.labelled, large.labelled[:3, :20])
    assert small.unlabelled.shape == (3, 100)
    assert large.unlabelled.shape == (5, 210)
    for trial in range(5):
        parts = [large.test, large.labelled[trial], large.unlabelled[trial]]
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(300))
    assert not np.array_equal(small.labelled[0], small.labelled[1])
    other = split_trials(300, 20, 3, unlabelled=100, test=50, seed=5)
    assert not np.array_equal(small.test, other.test)
    with pytest.raises(ValueError, match="300 rows, but 50 test rows and 250 labelled"):
        split_trials(300, 250, 3, unlabelled=100, test=50)


def test_folders_are_found_under_uci_or_at_the_root(folder, monkeypatch):
    x, y = read_uci("toy", folder)
    assert x.shape == (160, 3)
    assert y.shape == (160,)
    assert x.dtype == y.dtype == np.float64
    assert np.array_equal(read_uci("toy", folder / "uci")[0], x)
    monkeypatch.setenv("FEWSHOT_DPKL_DATA", str(folder))
    assert np.array_equal(read_uci("toy")[0], x)


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_set_says_where_it_comes_from(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="https://"):
        read_uci(name, tmp_path)


def test_csv_files(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("size, price,age\n1,10,3\n2,20,4\n\n")
    x, y = read_uci(f"{path}:price")
    assert x.tolist() == [[1, 3], [2, 4]]
    assert y.tolist() == [10, 20]
    with pytest.raises(ValueError, match=r"no target column 'cost'; .* size, price, age"):
        read_csv(path, "cost")
    with pytest.raises(ValueError, match="no target column ''"):
        read_uci(str(path))
    for content, words in [
        ("a,b\n1,x\n", "numbers only"),
        ("a,b\n1,2\n1\n", "equally many"),
        ("a,b\n", "rows do not"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            read_csv(path, "b")


def test_unusable_arrays_are_refused(folder):
    path = folder / "uci" / "toy" / "X.npy"
    x = np.load(path)
    np.save(path, x[:-1])
    with pytest.raises(ValueError, match="expected N × D inputs and N targets"):
        read_uci("toy", folder)
    x[5, 1] = np.nan
    np.save(path, x)
    with pytest.raises(ValueError, match="missing or infinite values in 1 rows"):
        read_uci("toy", folder)
    for array in (np.array([["a", "b"]]), np.array([{}], dtype=object)):
        np.save(path, array)
        with pytest.raises(ValueError, match=r"X.npy is not an array of numbers"):
            read_uci("toy", folder)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"X.npy is not an array of numbers"):
        read_uci("toy", folder)


def test_test_rows_have_no_say_in_the_training_data():
    original = cell()
    spoilt = replace(original, x=original.x.copy(), y=original.y.copy())
    spoilt.x[original.test] = 1e6
    spoilt.y[original.test] = 1e6
    before, after = trial_tensors(original), trial_tensors(spoilt)
    for name in ("x", "y", "unlabelled"):
        assert before[name].equal(after[name]), name
    assert before["y"].mean(1).abs().max() < 1e-12
    assert abs(float(before["y"].std(1, correction=0)[0]) - 1) < 1e-12
    assert not before["x_test"].equal(after["x_test"])


@pytest.mark.parametrize("model", MODELS)
def test_a_trial_is_the_same_in_any_batch(model):
    both = run_cell(cell(model))
    first = run_cell(cell(model, trials=1))
    assert [row["trial"] for row in both.rows] == [0, 1]
    for metric in ("rmse", "nll"):
        # float32 networks: 50 steps of Nadam turn a last bit into about 1e-3
        assert both.rows[0][metric] == pytest.approx(first.rows[0][metric], rel=1e-2)
        assert both.rows[0][metric] != both.rows[1][metric]
    assert both.embedding.shape[0] == 50


def test_learning_the_noise_is_beyond_the_paper_and_off():
    assert not cell().regressor.settings().learn_noise
    fixed, learnt = run_cell(cell("dkl")), run_cell(cell("dkl", learn=True))
    assert learnt.rows[0]["nll"] != fixed.rows[0]["nll"]


def test_a_target_without_variation_is_an_error():
    constant = cell()
    with pytest.raises(ValueError, match="targets of a trial are all the same"):
        run_cell(replace(constant, y=np.ones_like(constant.y)))
    with pytest.raises(ValueError, match="no rows are left as unlabelled"):
        run_cell(cell("ssgp", unlabelled=constant.unlabelled[:, :0]))


def test_results_are_on_disk_after_every_cell_and_taken_up_again(tmp_path):
    settings = {"seed": 0}
    results = Results(tmp_path, settings)
    results.add_cell(run_cell(cell("dkl")))
    again = Results(tmp_path, settings)
    assert again.done == {("toy", "dkl", 20)}
    assert again.rows == results.rows
    with pytest.raises(ValueError, match="was made with seed 0, not 1"):
        Results(tmp_path, {"seed": 1})
    with pytest.raises(ValueError, match="was made with learn None, not True"):
        Results(tmp_path, {"seed": 0, "learn": True})
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="not a result of this program"):
        Results(tmp_path, settings)


def test_tables_show_means_deviations_and_paired_differences(tmp_path):
    results = Results(tmp_path, {})
    for model, values in (("dkl", (1.0, 2.0)), ("dpkl", (0.5, 2.1))):
        results.rows += [
            {"dataset": "toy", "model": model, "size": 5, "trial": t, "rmse": v, "nll": 2 * v}
            for t, v in enumerate(values)
        ]
    assert "| data set | n | DKL | DPKL |" in results.cell_table("rmse")
    assert "| toy | 5 | 1.500 ± 0.707 | **1.300** ± 1.131 |" in results.cell_table("rmse")
    assert "| DPKL - DKL |" in results.paired_table("nll")
    assert "| toy | 5 | -0.400 ± 0.600 (1/2) |" in results.paired_table("nll")
    assert "-0.200 ± 0.300 (1/2)" in results.tables()


def test_the_script_writes_everything_and_goes_on_after_an_interruption(folder, script):
    out = folder / "out"
    common = ["--data-root", folder, "--datasets", "toy", "--test", 50, "--trials", 2, "--unlabeled", 30]
    common += ["--out", out]
    chosen = ["--models", "gp", "dpkl", "--sizes", 20, "--threads", 2]
    command = [sys.executable, ROOT / "scripts" / "run_uci.py", *common, *chosen]
    first = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert first.returncode == 0, first.stderr
    assert "2 cells in" in first.stdout
    assert first.stderr == ""
    kept = json.loads((out / "results.json").read_text())["rows"]
    for row in kept:  # made by two workers; the same in this process
        expected = run_cell(cell(row["model"], x=read_uci("toy", folder)[0], y=read_uci("toy", folder)[1]))
        assert row["rmse"] == pytest.approx(expected.rows[row["trial"]]["rmse"], rel=1e-2)
    second = script(*common, "--models", "gp", "dpkl", "ssdkl", "--sizes", 20, 30, "--threads", 1)
    assert "4 cells in" in second.stdout, second.stderr
    assert "2 from before" in second.stdout
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert rows[:4] == kept
    assert len(rows) == 12
    assert set(rows[0]) == {"dataset", "model", "size", "trial", "rmse", "nll"}
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12
    for name in ("rmse", "nll", "embeddings"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()
    assert "| data set | n | GP | SSDKL | DPKL |" in (out / "table.md").read_text()
    assert_refused(script(*common, "--seed", 1), "was made with seed 0, not 1")


def test_the_script_refuses_in_one_sentence(folder, script):
    common = ["--data-root", folder, "--out", folder / "out"]
    assert_refused(script(*common, "--datasets", "buzz"), "archive.ics.uci.edu/dataset/248")
    assert_refused(script(*common, "--datasets", "toy"), "lower --test or --sizes")
    assert_refused(script(*common, "--datasets", "toy", "--sizes", 1), "at least 2")
    assert_refused(script(*common, "--datasets", "toy", "--trials", 0), "--trials is 0")
    (folder / "file").touch()
    assert_refused(
        script("--data-root", folder, "--out", folder / "file", "--datasets", "toy"), "File exists"
    )


def test_help_shows_an_example_and_the_sources(script):
    shown = script("--help").stdout
    assert "fewshot-dpkl uci --datasets" in shown
    for name in SOURCES:
        assert name in shown


def real_cell(data_root, dataset, model, size=100, trials=10) -> Cell:
    x, y = read_uci(dataset, data_root)
    split: TrialSplit = split_trials(len(x), size, trials, unlabelled=0)
    return Cell(dataset, model, size, x, y, split.test, split.training, split.labelled, split.unlabelled)


def test_dpkl_beats_dkl_on_real_data(data_root):
    dkl, dpkl = (run_cell(real_cell(data_root, "parkinsons", model, trials=3)) for model in ("dkl", "dpkl"))
    for metric in ("rmse", "nll"):
        ours, theirs = (np.mean([row[metric] for row in result.rows]) for result in (dpkl, dkl))
        assert ours < theirs


# RMSE and NLL of the authors' code on the same data, n = 100, 3 trials
AUTHORS = {
    "parkinsons": (0.898, 1.325),
    "elevators": (0.737, 1.174),
    "skillcraft": (0.767, 1.250),
    "pol": (0.457, 1.039),
    "gas": (0.371, 1.000),
}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", AUTHORS)
def test_dpkl_is_no_worse_than_the_authors_code(data_root, dataset):
    result = run_cell(real_cell(data_root, dataset, "dpkl"))
    for metric, figure in zip(("rmse", "nll"), AUTHORS[dataset], strict=True):
        values = np.array([row[metric] for row in result.rows])
        assert values.mean() <= figure + values.std(ddof=1)
