"""scripts/run_mnist.py as a user runs it, on made-up digits."""

import csv
import json
import multiprocessing

import numpy as np
import pytest

from fewshot_dpkl.experiments.mnist import DEFAULT, MODELS, Cell, run_cells
from fewshot_dpkl.experiments.mnist.report import METRICS, report
from fewshot_dpkl.experiments.results import Results
from tests.conftest import assert_refused
from tests.data.test_mnist import write_digits


@pytest.fixture
def root(tmp_path):
    write_digits(tmp_path / "mnist")
    return tmp_path


def test_the_script_writes_everything_and_goes_on_after_an_interruption(root, run_script):
    out = root / "out"
    common = ["--data-root", root, "--trials", 2, "--threads", 2, "--out", out]
    first = run_script("run_mnist.py", *common, "--models", "blr", "dpkl", "--sizes", 20)
    assert first.returncode == 0, first.stderr
    assert "2 cells in" in first.stdout
    kept = json.loads((out / "results.json").read_text())["rows"]
    second = run_script("run_mnist.py", *common, "--models", *DEFAULT, "--sizes", 20, 40)
    assert second.returncode == 0, second.stderr
    assert "8 cells in" in second.stdout
    assert "2 from before" in second.stdout
    document = json.loads((out / "results.json").read_text())
    paper = {"hidden": 64, "frequencies": 640, "batch_size": 32, "epochs": 100}
    assert {"trials": 2, "seed": 0, **paper}.items() <= document["settings"].items()
    assert set(document["versions"]) == {"python", "torch", "numpy"}
    assert document["rows"][:4] == kept
    assert len(document["rows"]) == 20
    assert {"model", "size", "trial", "error", "nll"} <= set(document["rows"][0])
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 20
    for name in ("error", "nll", "embedding"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()
    assert "| 20 | dpkl |" in (out / "table.md").read_text()
    assert_refused(run_script("run_mnist.py", *common, "--seed", 1), "was made with seed 0, not 1")


def test_quick_is_small(root, run_script):
    result = run_script(
        "run_mnist.py", "--quick", "--data-root", root, "--models", "blr", "--threads", 1, "--out", root / "o"
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads((root / "o" / "results.json").read_text())["rows"]
    assert {(row["size"], row["trial"]) for row in rows} == {(50, 0), (50, 1), (100, 0), (100, 1)}


def test_the_script_refuses_in_one_sentence(root, run_script):
    common = ["--data-root", root, "--out", root / "out"]
    assert_refused(run_script("run_mnist.py", *common, "--trials", 0), "--trials is 0")
    assert_refused(run_script("run_mnist.py", *common, "--sizes", 25), "size 25")
    assert_refused(run_script("run_mnist.py", *common, "--sizes", 4000), "one class has 30 only")
    (root / "out").mkdir()
    (root / "out" / "results.json").write_text("[]")
    assert_refused(run_script("run_mnist.py", *common), "not a result of this program")


def test_no_data_and_no_network_is_one_sentence(tmp_path, run_script, monkeypatch):
    import torchvision.datasets

    def unreachable(root, download):
        raise RuntimeError("Error downloading")

    monkeypatch.setattr(torchvision.datasets, "MNIST", unreachable)
    arguments = ["--data-root", tmp_path, "--out", tmp_path / "out"]
    assert_refused(run_script("run_mnist.py", *arguments), "could not be downloaded", "--data-root")


def test_help_names_every_model(run_script):
    shown = run_script("run_mnist.py", "--help").stdout
    assert "fewshot-dpkl mnist --models blr bnn dblr dpkl" in shown
    for model in MODELS:
        assert model in shown


def cells(number=3) -> list[Cell]:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, size=(200, 25), dtype=np.uint8), np.arange(200) % 10
    training, validation = np.arange(20).reshape(1, 20), np.arange(20, 30).reshape(1, 10)
    return [
        Cell("blr", size, images, labels, training, validation, images[:30], labels[:30], epochs=20)
        for size in range(number)
    ]


def test_progress_is_reported_at_every_check():
    seen: list[int] = []
    assert len(list(run_cells(cells(), 2, lambda cell: seen.append(cell.size)))) == 3
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    assert all(cell.checks == 2 for cell in cells())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_run_ends_its_workers(workers):
    started: list[int] = []
    results = run_cells(cells(200), workers, lambda cell: started.append(cell.size))
    next(results)
    results.close()
    assert not multiprocessing.active_children()
    assert len(set(started)) < 200


def test_two_runs_in_one_folder_keep_each_others_cells(tmp_path):
    first, second = (Results(tmp_path, {}, METRICS, MODELS) for _ in range(2))

    def row(size: int) -> list[dict[str, float | str]]:
        return [{"model": "blr", "size": size, "trial": 0, "error": 1.0, "nll": 2.0}]

    first.add(row(100))
    for size in (200, 300):
        second.add(row(size))
    first.add(row(200))  # both had it to do: it is there once
    first.add(row(400))
    found = Results(tmp_path, {}, METRICS, MODELS)
    assert found.found_sizes == [100, 200, 300, 400]
    assert len(found.rows) == len(found.cells) == 4


def test_tables_show_means_deviations_and_paired_differences(tmp_path):
    results = Results(tmp_path, {}, METRICS, MODELS)
    for model, values in (("dblr", (10.0, 20.0)), ("dpkl", (5.0, 21.0))):
        rows = [
            {"model": model, "size": 100, "trial": t, "error": v, "nll": v / 10} for t, v in enumerate(values)
        ]
        results.add(rows, seconds=1.0)
    text = report(results)
    assert "| 100 | dblr | 15.00 ± 7.07 | 1.500 ± 0.707 |" in text
    assert "| dpkl - dblr | 100 | -2.00 ± 3.00 | 1/2 | -0.200 ± 0.300 | 1/2 | 13 % |" in text
    assert Results(tmp_path, {}, METRICS, MODELS).done == {("dblr", 100), ("dpkl", 100)}
