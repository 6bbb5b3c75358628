import csv
import json

from fewshot_dpkl import FeatureSet
from fewshot_dpkl.evaluation.names import WORDNET, readable


def test_names_are_those_that_people_say():
    assert len(WORDNET) == len(set(WORDNET.values())) == 100
    assert readable(["n04522168", "n02129165", "mine"]) == ["vase", "lion", "mine"]
    assert readable(["001.Black_footed_Albatross", "017.Cardinal"]) == ["Black footed Albatross", "Cardinal"]
    assert readable(["001.Owl", "002.Owl"]) == ["001.Owl", "002.Owl"]


def test_every_class_of_mini_imagenet_has_a_name(data_root):
    for table in ("train", "val", "test"):
        with (data_root / "mini-imagenet" / f"{table}.csv").open() as file:
            assert {row["label"].removeprefix("n") for row in csv.DictReader(file)} <= set(WORDNET)


def test_the_report_shows_names(run_command, tmp_path):
    out = tmp_path / "out"
    result = run_command("eval", "--head", "nn", "--episodes", 8, "--out", out, "--report", out / "r.html")
    assert result.returncode == 0, result.stderr
    names = {row["name"] for row in json.loads((out / "results.json").read_text())["classes"]}
    assert names <= set(readable(FeatureSet.shipped().class_names))
    page = (out / "r.html").read_text()
    assert any(name in page for name in names)
    assert "n0" + "4522168" not in page
