"""MNIST on disk and its splits."""

import gzip
import struct

import numpy as np
import pytest
import torchvision.datasets

from fewshot_dpkl.data.mnist import FILES, read_idx, read_mnist, split_digits


def idx(array: np.ndarray) -> bytes:
    """The idx format, written by its description: two zeros, 8 for bytes, dimensions, sizes, data."""
    return (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_digits(folder, zipped=True, per_class=30, test_per_class=8, side=6, seed=0):
    """Made-up digits: every class its own pattern, with noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 256, size=(10, side, side)) * (rng.random((10, side, side)) < 0.5)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("training", per_class), ("test", test_per_class)):
        labels = rng.permutation(np.repeat(np.arange(10), count))
        images = np.clip(patterns[labels] + rng.normal(0, 40, (len(labels), side, side)), 0, 255)
        for name, array in ((f"{part} images", images), (f"{part} labels", labels)):
            content = idx(array)
            path = folder / (FILES[name] + (".gz" if zipped else ""))
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("layout", ["mnist", "MNIST/raw", "."])
def test_every_layout_is_read_as_it_is(tmp_path, layout, zipped):
    write_digits(tmp_path / layout, zipped)
    digits = read_mnist(tmp_path, download=False)
    assert digits.images.shape == (300, 36)
    assert digits.test_images.shape == (80, 36)
    assert digits.images.dtype == np.uint8
    assert np.bincount(digits.labels).tolist() == [30] * 10


def test_missing_files_without_a_network_are_one_sentence(tmp_path, monkeypatch):
    def unreachable(root, download):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(torchvision.datasets, "MNIST", unreachable)
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded .*--data-root"):
        read_mnist(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no MNIST in"):
        read_mnist(tmp_path, download=False)


def test_missing_files_are_downloaded_by_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torchvision.datasets, "MNIST", lambda root, download: write_digits(root / "MNIST" / "raw", False)
    )
    assert len(read_mnist(tmp_path).labels) == 300


def test_damaged_files_are_refused(tmp_path):
    whole = idx(np.arange(24).reshape(2, 3, 4))
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(whole))
    assert read_idx(path).tolist() == np.arange(24).reshape(2, 3, 4).tolist()
    garbled = bytearray(gzip.compress(whole))
    garbled[10] ^= 0xFF  # the first byte after the header
    cut = gzip.compress(whole)[:-12]
    for content in (cut, gzip.compress(whole[:-1]), whole, gzip.compress(b"ab"), b"", bytes(garbled)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged or not an idx file"):
            read_idx(path)
    folder = write_digits(tmp_path / "mnist", zipped=False)
    (folder / FILES["test labels"]).write_bytes(idx(np.arange(7)))
    with pytest.raises(ValueError, match="as many labels"):
        read_mnist(tmp_path)


def test_splits_are_balanced_disjoint_and_seeded():
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    split = split_digits(labels, 100, 3, seed=5)
    assert split.training.shape == (3, 90)
    assert split.validation.shape == (3, 10)
    for training, validation in zip(split.training, split.validation, strict=True):
        assert np.bincount(labels[training]).tolist() == [9] * 10
        assert np.bincount(labels[validation]).tolist() == [1] * 10
        assert len({*training, *validation}) == 100
    assert np.array_equal(split.training, split_digits(labels, 100, 5, seed=5).training[:3])
    larger = split_digits(labels, 400, 1, seed=5)
    assert {*split.training[0], *split.validation[0]} < {*larger.training[0], *larger.validation[0]}
    assert not np.array_equal(split.training, split_digits(labels, 100, 3, seed=6).training)
    assert not np.array_equal(split.training[0], split.training[1])
    for size in (105, 10):
        with pytest.raises(ValueError, match="the same number"):
            split_digits(labels, size, 1)
    with pytest.raises(ValueError, match="needs 1000 digits of each class"):
        split_digits(labels, 10000, 1)


def test_the_real_files(data_root):
    digits = read_mnist(data_root, download=False)
    assert digits.images.shape == (60000, 784)
    assert digits.test_images.shape == (10000, 784)
    assert np.bincount(digits.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert digits.images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)  # the mean that everyone subtracts
