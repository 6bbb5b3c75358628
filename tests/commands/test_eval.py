"""scripts/eval_episodes.py, used as a user would."""

import csv
import json
import os
import re
import shlex
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
    assert set(document) == {
        *("command", "settings", "versions", "features", "heads", "paired", "classes", "sweeps")
    }
    assert set(document["heads"]["nn"]) == {
        *("accuracy", "ci95", "nll", "nll_ci95", "ece", "brier", "brier_ci95"),
        *("accuracy_at_80", "accuracy_at_80_ci95", "entropy_right", "entropy_wrong"),
        *("reliability", "seconds", "episodes", "saw_unlabeled"),
    }
    assert document["sweeps"] == {}
    assert shlex.split(document["command"])[2:] == [str(argument) for argument in arguments]
    assert sum(document["heads"]["nn"]["reliability"]["count"]) == 6 * 3 * 4
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


def test_sweeps_and_unseen_queries_stand_beside_the_plain_run(features, run_script, tmp_path):
    common = ["--features", features, "--head", "nn", "--head", "centroid", "--episodes", 4]
    common += ["--way", 3, "--shot", 2, "--query", 4]
    plain = run_script("eval_episodes.py", *common, "--out", tmp_path / "plain")
    more = ["--sweep-shot", 5, 2, 5, "--sweep-way", 8, "--unseen", "--out", tmp_path / "more"]
    ran = run_script("eval_episodes.py", *common, *more)
    assert plain.returncode == ran.returncode == 0, ran.stderr
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert re.findall(r"^\d+-way \d+-shot$", ran.stdout, re.M) == [
        "3-way 2-shot",
        "3-way 5-shot",
        "8-way 2-shot",
    ]
    assert ran.stdout.count("unseen AUROC") == 2
    assert ran.stdout.strip().endswith("no class is left unseen in 8-way tasks")

    one, two = (json.loads((tmp_path / run / "results.json").read_text()) for run in ("plain", "more"))
    for name, figures in one["heads"].items():
        same = {key: two["heads"][name][key] for key in figures}
        assert {**figures, "seconds": 0} == {**same, "seconds": 0}
    assert one["classes"] == two["classes"]
    assert [(run["way"], run["shot"]) for run in two["sweeps"]["shot"]] == [(3, 2), (3, 5)]
    assert two["sweeps"]["shot"][0]["heads"] == two["heads"]
    (widest,) = two["sweeps"]["way"]
    assert "unseen_auroc" not in widest["heads"]["nn"]
    loaded = FeatureSet.load(features)
    sampler = EpisodeSampler(loaded, way=3, shot=5, query=4)
    expected = evaluate({"nn": make_head("nn")}, loaded, sampler, 4, unseen=True)["nn"].summary()
    found = two["sweeps"]["shot"][1]["heads"]["nn"]
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    rows = list(csv.DictReader((tmp_path / "more" / "episodes.csv").open()))
    assert [(row["way"], row["shot"]) for row in rows[::8]] == [("3", "2"), ("3", "5"), ("8", "2")]
    aurocs = [float(row["unseen_auroc"]) for row in rows[8:12]]
    assert np.mean(aurocs) == pytest.approx(expected["unseen_auroc"], abs=1e-6)
    assert {row["unseen_auroc"] for row in rows[16:]} == {""}


def test_without_a_head_three_are_compared_and_one_is_advised(features, run_script):
    small = ["--episodes", 1, "--way", 3, "--shot", 2, "--query", 2, "--unseen", "--threads", 1]
    ran = run_script("eval_episodes.py", "--features", features, *small)
    assert ran.returncode == 0, ran.stderr
    tables = ran.stdout.split("\n\n")
    for table in tables[:3]:
        assert [row.split()[0] for row in table.splitlines()[1:]] == ["nn", "dpkl", "dpkl-calibrated"]
    assert [len(row.split(" - ")) > 1 for row in tables[2].splitlines()[1:]] == [False, True, False]
    assert tables[3].startswith("Use dpkl-calibrated; dpkl is the paper's head")


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
    script += ["--episodes", "5", "--way", "3", "--shot", "2", "--query", "4", "--unseen", "--out"]
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
        for figure in set(one[head]) - {"seconds", "reliability"}:
            assert one[head][figure] == pytest.approx(two[head][figure], abs=1e-6)
        for column, values in one[head]["reliability"].items():
            assert values == pytest.approx(two[head]["reliability"][column], abs=1e-4)
    assert (tmp_path / "one" / "episodes.csv").read_text() == (tmp_path / "two" / "episodes.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head", "svm"], ["no head 'svm'", "choose from nn"]),
        (["--features", "nowhere.npz"], ["no features file at nowhere.npz", "fewshot-dpkl extract"]),
        (["--query", "26"], ["has 30 examples", "takes 31"]),
        (["--way", "9"], ["hold 8", "lower way"]),
        (["--episodes", "0"], ["episodes is 0"]),
        (["--way", "8", "--unseen"], ["8-way task leaves no class unseen", "lower way"]),
        (["--sweep-shot", "1", "40"], ["has 30 examples", "takes 56"]),
        (["--sweep-way", "1"], ["way is 1"]),
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


OWN = """import torch
from fewshot_dpkl import Head


class NearestMean(Head):
    \"\"\"Softmax of minus the squared distance to the class means.\"\"\"

    name = "nearest-mean"

    def __init__(self, sharpness=0.5):
        self.sharpness = sharpness

    def fit_episodes(self, support, labels, seeds):
        members = torch.nn.functional.one_hot(labels).to(support)  # E n C
        return {"means": members.mT @ support / members.sum(1)[..., None]}  # E C D

    def log_proba_episodes(self, state, query):
        distances = torch.cdist(query, state["means"])  # E q C
        return (-self.sharpness * distances.square()).log_softmax(-1)
"""


def test_a_head_of_twenty_lines_is_evaluated_beside_dpkl(features, tmp_path):
    (tmp_path / "my_heads.py").write_text(OWN)
    assert len(OWN.splitlines()) <= 20
    start = [sys.executable, "-c", "from fewshot_dpkl.__main__ import main; main()", "eval"]
    given = ["--head", "dpkl", "--head", "my_heads:NearestMean", "--head", "sklearn.naive_bayes:GaussianNB"]
    task = ["--features", str(features), "--episodes", "4", "--way", "3", "--shot", "3", "--query", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(
        [*start, *given, *task, "--out", "run"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:4]] == [
        "dpkl",
        "nearest-mean",
        "GaussianNB",
    ]
    found = json.loads((tmp_path / "run" / "results.json").read_text())["heads"]
    loaded = FeatureSet.load(features)
    drawn = EpisodeSampler(loaded, way=3, shot=3, query=5).draw(range(4))
    right = []
    for support, query in zip(drawn.support, drawn.query, strict=True):
        means = loaded.features[support].mean(1)  # C D
        distances = ((loaded.features[query][:, :, None] - means) ** 2).sum(-1)  # C q C
        right.append((distances.argmin(-1) == np.arange(3)[:, None]).mean())
    assert found["nearest-mean"]["accuracy"] == pytest.approx(np.mean(right))
    assert found["dpkl"]["accuracy"] > 0.5


@pytest.mark.parametrize("kind", ["markdown", "latex"])
def test_tables_for_a_readme_and_a_paper(kind, features, run_script):
    common = ["--features", features, "--head", "nn", "--head", "centroid", "--episodes", 3, "--shot", 1]
    plain = run_script("eval_episodes.py", *common, "--sweep-shot", 1)
    made = run_script("eval_episodes.py", *common, "--sweep-shot", 1, "--table", kind)
    assert made.returncode == 0, made.stderr
    (accuracy,) = re.findall(r"^nn +(\d+\.\d\d) ± ", plain.stdout, re.M)
    if kind == "latex":
        assert made.stdout.startswith("% 5-way 1-shot\n\\begin{tabular}{lrrrrr}\n\\toprule\n")
        assert f"\nnn & {accuracy} $\\pm$ " in made.stdout
        assert r"accuracy \% at 80 \% &" in made.stdout
    else:
        assert made.stdout.startswith("5-way 1-shot\n\n| head | accuracy % | NLL |")
        assert f"\n| nn | {accuracy} ± " in made.stdout


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
    assert "fewshot-dpkl eval --head dpkl" in result.stdout
