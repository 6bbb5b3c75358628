"""Decoded pictures: right pixels, decoded once, nothing half-written."""

from __future__ import annotations

import errno
import io

import numpy as np
import pytest
from PIL import Image

from fewshot_dpkl.data import load_pixels, load_usable, open_split, read_folder
from fewshot_dpkl.data.pixels import decode
from tests.picture_files import make_folder, picture, zipped


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "pictures", {"base": 2}, per_class=3)


def test_a_picture_of_the_right_size_is_left_alone():
    content = picture(0)
    assert np.array_equal(decode(content, 84), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("size", [(40, 30), (30, 40)])
def test_the_middle_square_of_a_larger_picture_is_taken(size):
    content = picture(1, size, "PNG")
    whole = np.asarray(Image.open(io.BytesIO(content)))
    top, left = (whole.shape[0] - 30) // 2, (whole.shape[1] - 30) // 2
    assert np.array_equal(decode(content, 30), whole[top : top + 30, left : left + 30])


def test_the_shorter_side_is_resized():
    content = picture(2, (120, 60), "PNG")
    resized = Image.open(io.BytesIO(content)).resize((60, 30), Image.Resampling.BILINEAR)
    assert np.abs(decode(content, 30).astype(int) - np.asarray(resized)[:, 15:45]).max() <= 1


def test_grey_pictures_become_colour():
    buffer = io.BytesIO()
    Image.new("L", (10, 10), 7).save(buffer, "PNG")
    assert decode(buffer.getvalue(), 10).tolist() == np.full((10, 10, 3), 7).tolist()


def test_folder_and_zip_give_the_same_pixels(folder, tmp_path):
    archive = zipped(folder, tmp_path / "pictures.zip")
    first = load_pixels(read_folder(folder), 20, tmp_path / "a")
    second = load_pixels(read_folder(archive), 20, tmp_path / "b")
    assert first.shape == (6, 20, 20, 3)
    assert np.array_equal(first, second)


def test_pictures_are_decoded_once(folder, tmp_path, monkeypatch):
    split = read_folder(folder)
    first = np.array(load_pixels(split, 20, tmp_path / "cache"))
    monkeypatch.setattr("data.pixels.decode", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(first, load_pixels(split, 20, tmp_path / "cache"))


def test_other_files_of_the_same_name_are_not_taken_from_the_cache(folder, tmp_path):
    load_pixels(read_folder(folder), 20, tmp_path / "cache")
    name = next(folder.rglob("*.png"))
    name.write_bytes(picture(99, (31, 31), "PNG"))
    split = read_folder(folder)
    index = split.names.index(name.relative_to(folder).as_posix())
    assert np.array_equal(load_pixels(split, 20, tmp_path / "cache")[index], decode(name.read_bytes(), 20))


def test_a_broken_picture_is_named_and_nothing_is_left(folder, tmp_path):
    broken = sorted(folder.rglob("*.png"))[4]
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(
        ValueError, match=r"base-1/1\.png in .* is not a readable picture .*; download it again"
    ):
        load_pixels(read_folder(folder), 20, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_leaves_nothing_half_written(folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_2_0", full)
    with pytest.raises(
        OSError, match=r"cannot write the decoded pictures to .*: No space left on device; they take"
    ):
        load_pixels(read_folder(folder), 20, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_pictures_of_ones_own_that_cannot_be_read_are_passed_over_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    root = make_folder(tmp_path, {"own": 2}, per_class=3) / "own"
    whole = load_pixels(open_split(f"folder:{root}", "all"), 20)
    (root / "own-0" / "1.png").write_bytes(b"broken")
    (root / "own-1" / "notes.txt").write_text("no picture")
    (root / "own-1" / ".DS_Store").touch()
    (root / "own-1" / "2.png").rename(root / "own-1" / "2")  # the content decides
    for _ in range(2):  # decoded, and from the cache
        pixels, split, refused = load_usable(open_split(f"folder:{root}", "all"), 20)
        assert {name: reason[:26] for name, reason in refused.items()} == {
            "own-0/1.png": "no picture in a known form",
            "own-1/notes.txt": "no picture in a known form",
        }
        assert np.array_equal(pixels, whole[[0, 2, 3, 4, 5]])
        assert split.names == ["own-0/0.png", "own-0/2.png", "own-1/0.png", "own-1/1.png", "own-1/2"]
        assert split.labels.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"own-0/1\.png in .* is not a readable picture"):
        load_pixels(open_split(f"folder:{root}", "all"), 20)
    for file in (root / "own-0").iterdir():
        file.write_bytes(b"broken, too")
    with pytest.raises(
        ValueError, match=r"class own-0 .* no picture that can be read \(own-0/0\.png: no picture"
    ):
        load_usable(open_split(f"folder:{root}", "all"), 20)
    (root / "empty").mkdir()
    with pytest.raises(ValueError, match=r"class empty in .* has no picture; give it one, or remove it"):
        open_split(f"folder:{root}", "all")
