"""scripts/classify.py: from folders of pictures to a table, files and a saved model."""

from __future__ import annotations

import csv
import importlib.util
import json
from functools import partial

import numpy as np
import pytest

from fewshot_dpkl import HEADS, CentroidHead
from tests.conftest import assert_refused
from tests.picture_files import make_folder, odd_pictures

pytestmark = pytest.mark.usefixtures("registered_backbones")


@pytest.fixture
def birds(tmp_path, monkeypatch):
    """tmp/support/CLASS and tmp/query/CLASS, three classes told apart by colour."""
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    make_folder(tmp_path, {"support": 3, "query": 3}, per_class=4)
    for folder in (tmp_path / "query").iterdir():
        folder.rename(folder.with_name(folder.name.replace("query", "support")))
    (tmp_path / "support" / "support-0" / "0.png").unlink()  # uneven counts
    return tmp_path


@pytest.fixture
def classify(run_script, birds):
    """classify.py on the pictures of `birds`."""
    return partial(run_script, "classify.py", "--support", birds / "support", "--query", birds / "query")


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_head_of_ones_own_by_its_import_path(classify, birds, monkeypatch):
    own = "from fewshot_dpkl import CentroidHead\n\n\nclass Mine(CentroidHead):\n    name = 'mine'\n"
    (birds / "birds_heads.py").write_text(own)
    monkeypatch.syspath_prepend(birds)
    result = classify("--head", "birds_heads:Mine", "--head", "centroid")
    assert result.returncode == 0, result.stderr
    mine, ours = result.stdout.splitlines()[-2:]
    assert mine.startswith("accuracy of birds_heads:Mine on 12 pictures of known class:")
    assert mine.split(":")[-1] == ours.split(":")[-1]


def test_two_heads_side_by_side_with_accuracy(classify, birds):
    heads = ["--head", "centroid", "--head", "nn"]
    result = classify(*heads, "--out", birds / "a.csv")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"in {birds / 'query'}:"
    assert lines[1].split() == ["picture", "centroid", "nn"]
    assert lines[2].startswith("support-0/0.png  support-0 0.")
    assert len(lines) == 2 + 12 + 1 + 2
    rows = read(birds / "a.csv")
    assert len(rows) == 24
    for head, line in zip(("centroid", "nn"), lines[-2:], strict=True):
        right = np.mean([row["label"] == row["class"] for row in rows if row["head"] == head])
        assert line == f"accuracy of {head} on 12 pictures of known class: {100 * right:.1f} %"
    for row in rows:
        probabilities = {name: float(row[f"p({name})"]) for name in ("support-0", "support-1", "support-2")}
        assert sum(probabilities.values()) == pytest.approx(1)
        assert row["label"] == max(probabilities, key=probabilities.get)
        assert float(row["probability"]) == max(probabilities.values())


def test_a_saved_model_gives_the_same_answers_and_refuses_another_backbone(classify, run_script, birds):
    model = birds / "m.safetensors"
    first = classify("--head", "centroid", "--save", model, "--out", birds / "a.json")
    again = run_script(
        "classify.py", "--model", model, "--query", birds / "query", "--no-cache", "--out", birds / "b.json"
    )
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert first.stdout == f"wrote {model}\n" + again.stdout
    assert (birds / "a.json").read_text() == (birds / "b.json").read_text()
    one = next((birds / "query" / "support-1").iterdir())
    alone = run_script("classify.py", "--model", model, "--query", one)
    answer = next(line for line in again.stdout.splitlines() if line.startswith(f"support-1/{one.name}"))
    assert alone.stdout.splitlines()[-1].split() == [one.name, *answer.split()[1:]]
    other = run_script("classify.py", "--model", model, "--query", one, "--backbone", "conv4-cub")
    assert_refused(other, "m.safetensors was fitted with")


def test_not_sure_below_the_threshold(classify, birds):
    result = classify("--head", "nn", "--threshold", "1", "--out", birds / "a.json")
    assert result.stdout.count("not sure 0.") == 12
    assert result.stdout.splitlines()[-1].endswith("(not sure: 12)")
    answers = json.loads((birds / "a.json").read_text())["answers"]
    assert {answer["label"] for answer in answers} == {"not sure"}


def test_odd_pictures_are_classified_or_named_and_the_rest_goes_on(classify, birds):
    fine, refused = odd_pictures()
    for name, content in [*fine.items(), *((name, content) for name, (content, _) in refused.items())]:
        (birds / "query" / name).write_bytes(content)
    (birds / "query" / "notes.txt").write_text("by its content no picture")
    (birds / "query" / "picture.txt").write_bytes(fine["cmyk.jpg"])  # the content decides, not the ending
    (birds / "support" / "support-1" / "broken.jpg").touch()
    (birds / "support" / "support-1" / ".DS_Store").touch()
    (birds / "support" / "loose.png").write_bytes(fine["dot.png"])
    result = classify(birds / "gone.jpg", "--head", "nn", "--out", birds / "a.csv")
    assert result.returncode == 0, result.stderr
    passed_over = [line for line in result.stderr.splitlines() if line.startswith("passed over ")]
    named = {line.split(": ")[0].split("/")[-1]: line for line in passed_over}
    assert set(named) == {*refused, "broken.jpg", "gone.jpg", "notes.txt", "loose.png", ".DS_Store"}
    assert named["loose.png"].endswith("not in a folder of a class")
    for name, (_, why) in refused.items():
        assert why in named[name]
    answered = {row["picture"].split("/")[-1] for row in read(birds / "a.csv") if row["label"]}
    assert {*fine, "picture.txt"} <= answered
    assert not set(refused) & answered
    assert result.stdout.splitlines()[-1].startswith("accuracy of nn on 12 pictures")


def test_file_names_cannot_write_to_the_terminal(run_script, birds):
    source = next((birds / "query" / "support-1").iterdir())
    bad = birds / "query" / "\x1b[31mred\n.png"
    bad.write_bytes(source.read_bytes())
    result = run_script("classify.py", "--support", birds / "support", "--query", bad, "--head", "nn")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "�[31mred�.png" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--query", "{query}", "--support", "{tmp}/nowhere"], ["there is no folder"]),
        (
            ["--query", "{query}", "--support", "{tmp}/support/support-0"],
            ["has 0 folders"],
        ),
        (["--query", "{tmp}/empty", "--support", "{support}"], ["there are no pictures in"]),
        (["--support", "{support}"], ["nothing to do"]),
        (["--support", "{support}", "--save", "m.pt"], ["ends in .safetensors"]),
        (
            ["--support", "{support}", "--save", "m.safetensors", "--head", "nn", "--head", "dpkl"],
            ["one head"],
        ),
        (["--support", "{support}", "--query", "{query}", "--out", "a.txt"], ["ends in .csv or .json"]),
        (["--support", "{support}", "--query", "{query}", "--threshold", "7"], ["--threshold is 7.0"]),
        (["--support", "{support}", "--query", "{query}", "--head", "svm"], ["there is no head 'svm'"]),
        (["--support", "{support}", "--query", "{query}", "--backbone", "x"], ["no backbone 'x'"]),
        (["--model", "{tmp}/m.safetensors", "--query", "{query}"], ["no saved classifier at"]),
        (["--model", "{tmp}/m.safetensors", "--query", "{query}", "--head", "nn"], ["leave out --head"]),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(run_script, birds, arguments, words):
    (birds / "empty").mkdir()
    places = {"tmp": birds, "query": birds / "query", "support": birds / "support"}
    result = run_script("classify.py", *(argument.format(**places) for argument in arguments))
    assert_refused(result, *words)
    assert not list(birds.glob("*.safetensors"))


def test_a_class_without_a_readable_picture_is_refused(classify, birds):
    for file in (birds / "support" / "support-2").iterdir():
        file.write_bytes(b"")
    result = classify("--head", "nn")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "error: class support-2 has no picture that can be read; give it at least one, or remove its folder"
    )


HEIC = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(64)


def test_a_class_of_heic_files_or_of_nothing_is_an_error(classify, birds, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for file in (birds / "support" / "support-2").iterdir():
        file.write_bytes(HEIC)
        file.rename(file.with_suffix(".HEIC"))
    (birds / "support" / "empty").mkdir()
    result = classify("--head", "nn", "--out", birds / "a.csv")
    assert result.returncode == 2
    *named, error = result.stderr.splitlines()
    assert len(named) == 4
    assert all("HEIC: a HEIC picture; `pip install pillow-heif` to read it" in line for line in named)
    assert error.startswith("error: class empty, support-2 has no picture that can be read")
    assert not (birds / "a.csv").exists()


def test_a_long_list_of_what_is_left_out_ends_with_a_count(classify, birds):
    for number in range(30):
        (birds / "query" / f"note-{number:02d}").write_text("x")
    lines = classify("--head", "nn").stderr.splitlines()
    assert [line.split("/")[-1].split(":")[0] for line in lines[:20]] == [f"note-{n:02d}" for n in range(20)]
    assert lines[20].startswith("passed over 10 more, from ")
    assert lines[20].endswith("note-29")


def test_nothing_classified_is_an_error(run_script, birds):
    (birds / "none").mkdir()
    (birds / "none" / "a.jpg").write_bytes(b"")
    arguments = ["--support", birds / "support", "--query", birds / "none", "--out", birds / "a.csv"]
    result = run_script("classify.py", *arguments, "--head", "nn")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: none of the 1 files to classify is a picture")
    assert not (birds / "a.csv").exists()


def test_hints_name_a_cap_a_threshold_that_refuses_all_and_a_weak_backbone(classify, birds):
    hints = classify("--head", "dblr", "--head", "nn", "--threshold", "1").stderr.splitlines()
    assert "hint: dblr is not sure of every picture: its highest probability is 0." in hints[0]
    assert hints[0].endswith("the threshold 1; lower it, or use --head dpkl-calibrated")
    assert "hint: the probabilities of dblr cannot pass 0.79 for 3 classes" in hints[1]
    assert hints[2].startswith("hint: nn is not sure of every picture")
    assert "--backbone timm:" in hints[3]
    assert len(hints) == 4
    assert classify("--head", "nn", "--backbone", "conv4-cub").stderr == ""


def test_all_heads_and_the_default_head(classify, birds):
    assert classify().stdout.splitlines()[1].split() == ["picture", "dpkl-calibrated"]
    heads = classify("--head", "all").stdout.splitlines()[1].split()[1:]
    assert heads == [name for name in HEADS if name != "bnn"]


class Doubting(CentroidHead):
    """A fake head that finds every second picture unfamiliar."""

    def unfamiliarity(self, X):
        return np.tile([0.2, 0.97], len(X))[: len(X)]


def test_unfamiliar_pictures_are_none_of_these(classify, birds, monkeypatch):
    monkeypatch.setitem(HEADS, "centroid", Doubting)
    result = classify("--head", "centroid", "--unknown", "0.05", "--out", birds / "a.csv")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("none of these (unfamiliar 0.970)") == 6
    assert "(none of these: 6, accuracy of the others: " in result.stdout
    rows = read(birds / "a.csv")
    assert [row["label"] == "none of these" for row in rows] == [False, True] * 6
    assert [float(row["unfamiliarity"]) for row in rows] == [0.2, 0.97] * 6
    assert "none of these" not in classify("--head", "centroid", "--unknown", "0.01").stdout
    assert_refused(classify("--head", "centroid", "--unknown", "5"), "--unknown is 5.0")


def test_pictures_without_labels_teach_the_heads_that_can(classify, birds):
    def answers(*options):
        result = classify("--head", "centroid", "--head", "nn", "--out", birds / "a.csv", *options)
        assert result.returncode == 0, result.stderr
        rows = read(birds / "a.csv")
        found = {h: [row["probability"] for row in rows if row["head"] == h] for h in ("centroid", "nn")}
        return found, result.stdout

    plain, _ = answers()
    taught, printed = answers("--transductive", "--suggest", 2)
    again, _ = answers("--unlabeled", birds / "query")
    assert taught["nn"] == plain["nn"]
    assert taught["centroid"] == again["centroid"] != plain["centroid"]
    lines = printed.splitlines()
    named = lines[lines.index("label these next:") + 1 :][:2]
    assert len(set(named)) == 2
    assert all(line.startswith("  ") and line.endswith(".png") for line in named)


def test_options_of_unlabelled_pictures_that_make_no_sense(run_script, birds):
    for options, sentence in (
        (("--save", birds / "a.safetensors", "--transductive"), "give --query"),
        (("--query", birds / "query", "--suggest", 0), "from 1 on"),
    ):
        assert_refused(run_script("classify.py", "--support", birds / "support", *options), sentence)
    options = ("--model", birds / "a.safetensors", "--query", birds / "query", "--suggest", 2)
    assert_refused(run_script("classify.py", *options), "--model does not hold the labelled pictures")
