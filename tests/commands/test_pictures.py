"""Commands that read folders of pictures: what is left out is named and counted."""

from __future__ import annotations

import pytest

from fewshot_dpkl import FeatureSet
from tests.conftest import assert_refused
from tests.picture_files import make_folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of two classes with a broken picture and a note."""
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    root = make_folder(tmp_path, {"own": 2}, per_class=3) / "own"
    (root / "own-0" / "broken.jpg").write_bytes(b"")
    (root / "own-1" / "notes.txt").write_text("no picture")
    return root


def test_features_are_extracted_past_a_broken_picture_and_the_card_counts_it(own, tmp_path, run_command):
    result = run_command("extract", "--images", own, "--out", tmp_path / "f.npz")
    assert result.returncode == 0, result.stderr
    named = result.stderr.splitlines()
    assert named[0] == "passed over own-0/broken.jpg: the file is empty (0 bytes)"
    assert named[1].startswith("passed over own-1/notes.txt: no picture in a known format")
    features = FeatureSet.load(tmp_path / "f.npz")
    assert features.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert features.card["images"] == 6
    assert features.card["passed_over"] == 2


def test_a_class_without_a_picture_is_an_error_of_extraction(own, tmp_path, run_command):
    for path in (own / "own-1").iterdir():
        path.write_bytes(b"")
    result = run_command("extract", "--images", own, "--out", tmp_path / "f.npz")
    assert_refused(result, "class own-1", "has no picture that can be read", "the file is empty")
    assert not (tmp_path / "f.npz").exists()


def test_a_folder_of_ones_own_is_checked_like_a_download(own, tmp_path, run_command):
    result = run_command("prepare", "--dataset", f"folder:{own}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "folder:own all: 2 classes, 6 pictures\n"
    assert "passed over own-0/broken.jpg" in result.stderr
    make_folder(tmp_path / "splits", {"base": 2, "novel": 3}, per_class=2)
    result = run_command("prepare", "--dataset", f"folder:{tmp_path / 'splits'}", "--check-only")
    assert result.stdout.splitlines() == [
        "folder:splits base: 2 classes, 4 pictures",
        "folder:splits novel: 3 classes, 6 pictures",
    ]
    assert_refused(run_command("prepare", "--dataset", f"folder:{own / 'nowhere'}"), "does not exist")
    assert_refused(run_command("prepare", "--dataset", "imagenet"), "unknown data set 'imagenet'")
