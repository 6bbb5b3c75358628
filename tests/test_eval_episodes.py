"""scripts/eval_episodes.py, used as a user would."""

import csv
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fewshot_dpkl import EpisodeSampler, FeatureSet, evaluate, make_head
from tests.conftest import ROOT, assert_refused, cluster_features


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    path = tmp_path_factory.mktemp("features") / "clusters.npz"
    cluster_features().save(path)
    return path


def test_table_json_and_csv_agree_with_evaluate(features, run_script, tmp_path):
    arguments = [
        "--features",
        features,
        "--head",
        "nn",
        "--head",
        "centroid",
        "--head",
        "dblr",
        "--episodes",
        6,
    ]
    arguments += ["--way", 3, "--shot", 2, "--query", 4, "--seed", 5, "--out", tmp_path / "run"]
    result = run_script("eval_episodes.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no bar where there is no terminal
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(document) == {"settings", "versions", "features", "heads"}
    assert set(document["heads"]["nn"]) == {"accuracy", "ci95", "nll", "ece", "seconds", "episodes"}
    assert document["features"]["made"] == "up"

    loaded = FeatureSet.load(features)
    sampler = EpisodeSampler(loaded, way=3, shot=2, query=4, seed=5)
    expected = evaluate({"centroid": make_head("centroid")}, loaded, sampler, 6)["centroid"]
    assert document["heads"]["centroid"]["accuracy"] == pytest.approx(expected.accuracy.mean())
    assert f"{100 * expected.accuracy.mean():.2f} ±" in result.stdout
    rows = list(csv.DictReader((tmp_path / "run" / "episodes.csv").open()))
    assert len(rows) == 18
    ours = [float(row["accuracy"]) for row in rows if row["head"] == "centroid"]
    np.testing.assert_allclose(ours, expected.accuracy, atol=1e-6)
    difference = re.search(r"^centroid .* ([+-]\d+\.\d\d) ± ", result.stdout, re.M)
    assert float(difference[1]) == pytest.approx(
        100 * (document["heads"]["centroid"]["accuracy"] - document["heads"]["nn"]["accuracy"]), abs=0.006
    )


def test_two_processes_give_the_result_of_one(features, run_script, tmp_path):
    script = [
        str(ROOT / "scripts" / "eval_episodes.py"),
        "--features",
        str(features),
        "--head",
        "dblr",
        "--head",
        "nn",
    ]
    script += ["--episodes", "5", "--way", "3", "--shot", "2", "--query", "4", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *script, str(tmp_path / "one")], check=True, capture_output=True, env=environment
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launcher, *script, str(tmp_path / "two")], check=True, capture_output=True, env=environment
    )
    one, two = (json.loads((tmp_path / run / "results.json").read_text())["heads"] for run in ("one", "two"))
    for head in one:
        for figure in ("accuracy", "ci95", "nll", "ece", "episodes"):
            assert one[head][figure] == pytest.approx(two[head][figure], abs=1e-6)
    assert (tmp_path / "one" / "episodes.csv").read_text() == (tmp_path / "two" / "episodes.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head", "svm"], ["no head 'svm'", "choose from nn"]),
        (["--features", "nowhere.npz"], ["no features file at nowhere.npz", "extract_features.py"]),
        (["--query", "26"], ["has 30 examples", "takes 31"]),
        (["--way", "9"], ["hold 8", "lower way"]),
        (["--episodes", "0"], ["episodes is 0"]),
        (["--device", "tpu"], ["'tpu' is not available"]),
        (["--threads", "-1"], ["--threads is -1"]),
        (["--out", "pyproject.toml"], ["is a file; name a folder"]),
    ],
)
def test_bad_arguments_are_one_sentence(features, arguments, words, run_script, tmp_path):
    base = [] if "--features" in arguments else ["--features", features]
    out = [] if "--out" in arguments else ["--out", tmp_path / "run"]
    assert_refused(run_script("eval_episodes.py", *base, *out, "--head", "nn", *arguments), *words)
    assert not (tmp_path / "run").exists()


def test_nan_and_one_class_features_are_refused(run_script, tmp_path):
    made = cluster_features()
    spoilt = made.features.copy()
    spoilt[3, 1] = np.nan
    np.savez(tmp_path / "nan.npz", X=spoilt, y=made.labels)
    assert_refused(run_script("eval_episodes.py", "--features", tmp_path / "nan.npz"), "NaN", "row 3")
    np.savez(tmp_path / "one.npz", X=made.features, y=np.zeros(len(made), int))
    assert_refused(run_script("eval_episodes.py", "--features", tmp_path / "one.npz"), "5-way", "hold 1")
    np.savez(tmp_path / "shape.npz", X=made.features[:, :, None], y=made.labels)
    assert_refused(
        run_script("eval_episodes.py", "--features", tmp_path / "shape.npz"), "expected a table [N, D]"
    )


def test_help_explains_itself_with_an_example(run_script):
    result = run_script("eval_episodes.py", "--help")
    assert result.returncode == 0
    assert "python scripts/eval_episodes.py --head dpkl" in result.stdout
