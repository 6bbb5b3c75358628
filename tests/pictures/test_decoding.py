"""Every kind of picture: decoded as it should look, or refused with a reason."""

from __future__ import annotations

import io
import os
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fewshot_dpkl.pictures.decoding import PictureError, decode, prepare
from tests.picture_files import odd_pictures, picture

FINE, REFUSED = odd_pictures()


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", FINE)
def test_odd_pictures_are_decoded(name):
    assert decode(FINE[name], 20).shape == (20, 20, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_and_broken_pictures_are_refused_with_a_reason(name):
    content, why = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is printed beside the reason
        with pytest.raises(PictureError, match=why):
            decode(content, 20)


@pytest.mark.parametrize(
    "name", ["cmyk.jpg", "palette.png", "clear.png", "moving.gif", "moving.webp", "two-views.jpg"]
)
def test_colours_survive_their_encoding(name):
    assert np.abs(decode(FINE[name], 30)[15, 15].astype(int) - [200, 30, 20]).max() <= 8


def test_sixteen_bits_are_scaled_not_cut():
    assert set(decode(FINE["deep.png"], 30).ravel()) == {51_400 // 257}
    assert set(decode(FINE["deep.tif"], 30).ravel()) == {51_400 // 257}


def test_transparent_is_white_whatever_lies_under_it():
    black = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert (decode(encoded(black), 8) == 255).all()
    indexed = Image.new("P", (8, 8), 1)
    indexed.putpalette([255, 0, 0, 0, 0, 0])
    assert (decode(encoded(indexed, transparency=1), 8) == 255).all()
    assert (decode(encoded(indexed, transparency=0), 8) == 0).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright_as_pillow_turns_them(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(noise(20, 30)), exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    top, left = (upright.shape[0] - 20) // 2, (upright.shape[1] - 20) // 2
    assert np.array_equal(decode(content, 20), upright[top : top + 20, left : left + 20])


def test_a_flipped_bit_is_decoded_or_refused_and_nothing_else():
    rng = np.random.default_rng(0)
    for content in (
        FINE["cmyk.jpg"],
        FINE["palette-clear.gif"],
        FINE["deep.tif"],
        FINE["moving.webp"],
        picture(1),
    ):
        for _ in range(40):
            damaged = bytearray(content)
            for place in rng.integers(0, len(content), 3):
                damaged[place] ^= 1 << int(rng.integers(8))
            with suppress(PictureError):
                assert decode(bytes(damaged), 20).shape == (20, 20, 3)


def test_paths_images_arrays_and_tensors_give_the_same_pixels(tmp_path):
    pixels = noise(24, 36)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(pixels)))
    expected = decode(path.read_bytes(), 20)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    kinds = [path, str(path), path.read_bytes(), Image.open(path), pixels, tensor]
    kinds += [pixels / 255, tensor.float() / 255, pixels.astype(np.uint16) * 257]
    for kind in kinds:
        assert np.array_equal(prepare(kind, 20), expected)
    grey = pixels[..., 0]
    for kind in (grey, grey[..., None], torch.from_numpy(grey)[None], Image.fromarray(grey)):
        assert np.array_equal(prepare(kind, 24), np.repeat(grey[:, 6:30, None], 3, 2))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (np.zeros((3, 8, 8), np.uint8), r"an array of shape \[3, 8, 8\], expected \[H, W, 3\]"),
        (torch.zeros(8, 8, 3), r"a tensor of shape \[8, 8, 3\], expected \[3, H, W\]"),
        (np.full((8, 8, 3), 2.5), "values from 2.5 to 2.5, floats should go from 0 to 1"),
        (np.full((8, 8, 3), np.nan), "floats should go from 0 to 1"),
        (np.zeros((8, 8, 3), np.int64), "values of type int64"),
        (np.zeros((0, 8, 3), np.uint8), "an array of shape"),
        (Image.new("RGB", (0, 8)), "no pixels"),
        (7, "int is no kind of picture"),
    ],
)
def test_arrays_that_are_no_pictures_are_refused(kind, why):
    with pytest.raises(PictureError, match=why):
        prepare(kind, 8)


def test_files_that_are_no_pictures_are_refused(tmp_path, monkeypatch):
    with pytest.raises(PictureError, match="there is no such file"):
        prepare(tmp_path / "nothing.png", 8)
    with pytest.raises(PictureError, match="not a file"):
        prepare(tmp_path, 8)
    os.mkfifo(tmp_path / "pipe.png")  # reading it would wait for ever
    with pytest.raises(PictureError, match="not a file"):
        prepare(tmp_path / "pipe.png", 8)
    monkeypatch.setattr("fewshot_dpkl.pictures.decoding.MAX_BYTES", 2**20)
    (tmp_path / "long.png").write_bytes(b"0" * (3 * 2**20))
    with pytest.raises(PictureError, match="3 MB are too many, at most 1 are read"):
        prepare(tmp_path / "long.png", 8)
    half = tmp_path / "half.jpg"
    half.write_bytes(picture(0)[:700])
    with pytest.raises(PictureError, match="damaged"):
        prepare(Image.open(half), 8)


def test_heic_is_known_by_its_content_and_read_where_pillow_heif_is(monkeypatch):
    start = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(PictureError, match="a HEIC picture; `pip install pillow-heif` to read it"):
            decode(start + bytes(40), 8)
    pytest.importorskip("pillow_heif").register_heif_opener()
    pixels = np.full((40, 60, 3), (200, 30, 20), np.uint8)
    got = decode(encoded(Image.fromarray(pixels), "HEIF"), 20)
    assert np.abs(got.astype(int) - [200, 30, 20]).max() <= 8
    with pytest.raises(PictureError, match="no picture in a known format"):
        decode(start + bytes(40), 8)


def test_a_file_that_is_no_picture_is_not_read_to_its_end(tmp_path):
    film = tmp_path / "film.jpg"
    with film.open("wb") as file:
        file.write(b"\0\0\0\x18ftypqt  ")
        file.truncate(200 * 2**20)
    resource = pytest.importorskip("resource", reason="limits of a process are those of POSIX")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PictureError, match="no picture in a known format"):
        prepare(film, 8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # kilobytes
