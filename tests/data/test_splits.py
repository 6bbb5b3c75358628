"""Splits: complete, disjoint, the same from folder and zip, and one sentence for whatever is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fewshot_dpkl.data import (
    CLASSES,
    SPLITS,
    Store,
    open_split,
    read_cub,
    read_folder,
    read_mini_imagenet,
    splits,
    spread_per_class,
)
from tests.picture_files import make_cub, make_folder, make_mini_imagenet, zipped

READ = {"mini-imagenet": read_mini_imagenet, "cub": read_cub}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made")
    make_mini_imagenet(root / "mini-imagenet")
    make_cub(root / "cub")
    return root


def assert_complete_and_disjoint(dataset: str, root: Path) -> None:
    splits = {name: open_split(dataset, name, root) for name in SPLITS}
    classes = [set(split.class_names) for split in splits.values()]
    assert {name: len(split.class_names) for name, split in splits.items()} == CLASSES[dataset]
    assert len(set.union(*classes)) == sum(len(names) for names in classes) == sum(CLASSES[dataset].values())
    files = [name for split in splits.values() for name in split.names]
    assert len(files) == len(set(files))
    for split in splits.values():
        assert sorted(split.class_names) == split.class_names
        assert np.array_equal(np.unique(split.labels), np.arange(len(split.class_names)))


@pytest.mark.parametrize("dataset", ["mini-imagenet", "cub"])
def test_splits_are_complete_and_disjoint(dataset, made):
    assert_complete_and_disjoint(dataset, made)


@pytest.mark.parametrize(("dataset", "pictures"), [("mini-imagenet", 60_000), ("cub", 11_788)])
def test_real_splits_are_complete_and_disjoint(dataset, pictures, data_root):
    if not (data_root / dataset).exists():
        pytest.skip(f"no {dataset} in $FEWSHOT_DPKL_DATA")
    assert_complete_and_disjoint(dataset, data_root)
    assert sum(len(open_split(dataset, name, data_root)) for name in SPLITS) == pictures


def test_cub_split_is_that_of_chen_et_al(made):
    numbers = {
        name: [int(c.split(".")[0]) - 1 for c in read_cub(made / "cub", name).class_names] for name in SPLITS
    }
    assert numbers["base"] == list(range(0, 200, 2))
    assert numbers["val"] == list(range(1, 200, 4))
    assert numbers["novel"] == list(range(3, 200, 4))


@pytest.mark.parametrize("dataset", ["mini-imagenet", "cub"])
@pytest.mark.parametrize("split", SPLITS)
def test_zip_and_folder_list_the_same(dataset, split, made, tmp_path):
    archive = zipped(made / dataset, tmp_path / "all.zip")
    from_folder, from_zip = READ[dataset](made / dataset, split), READ[dataset](archive, split)
    assert from_folder.names == from_zip.names
    assert from_folder.class_names == from_zip.class_names
    assert np.array_equal(from_folder.labels, from_zip.labels)
    assert from_folder.store.read(from_folder.names[0]) == from_zip.store.read(from_zip.names[0])


def test_zip_files_inside_a_folder_count_as_unpacked(made, tmp_path):
    shutil.copytree(made / "mini-imagenet", tmp_path / "m")
    archive = zipped(tmp_path / "m", tmp_path / "all.zip")
    shutil.rmtree(tmp_path / "m" / "images")
    shutil.move(archive, tmp_path / "m" / "images-all.zip")
    assert len(read_mini_imagenet(tmp_path / "m", "novel")) == 40


def test_folder_reader_takes_every_class_or_those_of_a_split(tmp_path):
    make_folder(tmp_path, {"base": 3, "val": 2}, per_class=2)
    assert len(read_folder(tmp_path / "base")) == 6
    assert read_folder(tmp_path, "val").class_names == ["val-0", "val-1"]
    assert open_split(f"folder:{tmp_path}", "base").labels.tolist() == [0, 0, 1, 1, 2, 2]


def _drop_table(root: Path) -> None:
    (root / "val.csv").unlink()


def _drop_picture(root: Path) -> None:
    next((root / "images").glob("n00000070*")).unlink()


def _drop_class(root: Path) -> None:
    rows = (root / "val.csv").read_text().splitlines()
    (root / "val.csv").write_text("\n".join(rows[:-2]))


def _repeat_row(root: Path) -> None:
    rows = (root / "val.csv").read_text().splitlines()
    (root / "val.csv").write_text("\n".join([*rows, rows[-1]]))


def _other_columns(root: Path) -> None:
    (root / "val.csv").write_text("a,b,c\n1,2,3\n")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_drop_table, r"has no val\.csv; get the 84×84 pictures"),
        (_drop_picture, r"1 of 32 pictures of mini-imagenet val are missing .* first is images/n00000070"),
        (_drop_class, r"has 15 classes, expected 16"),
        (_repeat_row, r"lists images/n0000007900000001\.jpg 2 times, expected once"),
        (_other_columns, r"should have the columns filename,label"),
    ],
)
def test_a_damaged_download_is_named_in_one_sentence(damage, sentence, made, tmp_path):
    shutil.copytree(made / "mini-imagenet", tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises((OSError, ValueError), match=sentence):
        read_mini_imagenet(tmp_path / "m", "val")


def test_what_is_not_there_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*cub; get CUB_200_2011\.tgz .* https://"):
        open_split("cub", "novel", tmp_path)
    with pytest.raises(ValueError, match="choose mini-imagenet, cub or folder:PATH"):
        open_split("imagenet", "novel", tmp_path)
    with pytest.raises(ValueError, match="choose base, val or novel"):
        read_cub(tmp_path, "test")
    with pytest.raises(FileNotFoundError, match="expected a folder of pictures per class"):
        read_folder(tmp_path)
    (tmp_path / "x.zip").write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"x\.zip is not a readable zip file .* download it again"):
        Store(tmp_path / "x.zip")


def test_data_root_is_the_option_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEWSHOT_DPKL_DATA", "/somewhere")
    assert splits.data_root(tmp_path) == tmp_path
    assert splits.data_root() == Path("/somewhere")
    monkeypatch.delenv("FEWSHOT_DPKL_DATA")
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path))
    assert splits.data_root() == tmp_path / "data"


def test_a_few_of_every_class_are_spread_over_the_class():
    labels = np.array([0, 1, 0, 1, 0, 0, 0, 1])
    assert spread_per_class(labels, 3).tolist() == [0, 4, 6, 1, 3, 7]
    assert spread_per_class(labels, 4).tolist() == [0, 2, 5, 6, 1, 3, 7]
