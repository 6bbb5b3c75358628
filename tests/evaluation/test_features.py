import json

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

from fewshot_dpkl import FeatureSet
from tests.conftest import cluster_features


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_feature_set_comes_back_as_it_was(suffix, dtype, tmp_path):
    made = cluster_features()
    before = FeatureSet(
        made.features.astype(dtype), made.labels, made.class_names, {"backbone": "conv4", "n": 3}
    )
    before.save(tmp_path / f"f{suffix}")
    after = FeatureSet.load(tmp_path / f"f{suffix}")
    assert np.array_equal(after.features, before.features)
    assert after.features.dtype == dtype
    assert np.array_equal(after.labels, before.labels)
    assert after.class_names == before.class_names
    assert after.card == {**before.card, "checksum": before.checksum}


def test_plain_arrays_and_foreign_files_work(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(6, 3)), np.array(["b", "a", "b", "c", "a", "c"])
    made = FeatureSet.from_arrays(x, y)
    assert made.class_names == ["a", "b", "c"]
    assert made.labels.tolist() == [1, 0, 1, 2, 0, 2]
    np.savez(tmp_path / "x.npz", X=x, y=y)
    assert FeatureSet.load(tmp_path / "x.npz").labels.tolist() == made.labels.tolist()
    save_file({"features": x.astype(np.float32), "labels": made.labels}, tmp_path / "x.safetensors")
    assert FeatureSet.load(tmp_path / "x.safetensors").class_names == ["0", "1", "2"]


def test_hdf5_of_closer_look_few_shot_is_read_up_to_its_count(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.array([5, 5, 9, 9, 2, 2, 0, 0])
    with h5py.File(tmp_path / "novel.hdf5", "w") as file:
        file.create_dataset("all_feats", data=x)
        file.create_dataset("all_labels", data=y)
        file.create_dataset("count", data=[6])  # the last two rows were never written
    read = FeatureSet.load(tmp_path / "novel.hdf5")
    assert np.array_equal(read.features, x[:6])
    assert read.class_names == ["2", "5", "9"]
    assert read.labels.tolist() == [1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.ones((4, 2, 2)), np.arange(4), r"shape \[4, 2, 2\].*expected a table \[N, D\]"),
        (np.ones((4, 2)), np.arange(3), "4 rows of features but labels of shape"),
        (
            np.array([[1.0, np.nan], [1.0, 2.0]]),
            np.arange(2),
            "NaN or infinite features in 1 of 2 rows .first: row 0",
        ),
        (np.ones((0, 2)), np.arange(0), "empty"),
    ],
)
def test_arrays_that_cannot_be_features_are_refused(x, y, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        FeatureSet.from_arrays(x, y)
    np.savez(tmp_path / "f.npz", X=x, y=y)
    with pytest.raises(ValueError, match=words):
        FeatureSet.load(tmp_path / "f.npz")


def test_damaged_files_are_refused_and_pickles_never_read(tmp_path):
    np.savez(tmp_path / "p.npz", X=np.array([object()]), y=np.zeros(1))
    with pytest.raises(ValueError, match="not a readable npz"):
        FeatureSet.load(tmp_path / "p.npz")
    (tmp_path / "t.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ValueError, match="not a readable npz"):
        FeatureSet.load(tmp_path / "t.npz")
    (tmp_path / "t.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="not a readable file of features"):
        FeatureSet.load(tmp_path / "t.safetensors")
    np.savez(tmp_path / "n.npz", pixels=np.ones((2, 2)))
    with pytest.raises(ValueError, match="holds pixels; expected an array named features or X or x"):
        FeatureSet.load(tmp_path / "n.npz")
    (tmp_path / "f.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"known endings are .npz, .safetensors, .hdf5, .h5"):
        FeatureSet.load(tmp_path / "f.csv")


def test_a_changed_file_does_not_pass_its_checksum(tmp_path):
    made = cluster_features()
    FeatureSet(made.features, made.labels, made.class_names, {}).save(tmp_path / "f.safetensors")
    data = bytearray((tmp_path / "f.safetensors").read_bytes())
    data[-7] ^= 1  # in the arrays, behind the header
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|labels"):
        FeatureSet.load(tmp_path / "f.safetensors")


def test_a_feature_set_says_what_it_is_in_a_line_and_in_a_small_table(clusters):
    card = {
        "backbone": {"name": "conv4", "weights": list(range(500))},
        "dataset": "<b>birds</b>",
        "split": "novel",
    }
    made = FeatureSet(clusters.features, clusters.labels, clusters.class_names, card)
    assert repr(made) == (
        "FeatureSet(examples 240, classes 8, features 40, data set <b>birds</b>, split novel, backbone conv4)"
    )
    assert "<td>240</td>" in made._repr_html_()
    assert "&lt;b&gt;birds" in made._repr_html_()
    assert len(made._repr_html_()) < 700


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_whole_numbers_are_features_too(suffix, tmp_path):
    x, y = np.arange(12).reshape(6, 2), np.array([0, 0, 0, 1, 1, 1])
    made = FeatureSet(x, y, ["a", "b"])
    assert made.features.dtype == np.float32
    made.save(tmp_path / f"f{suffix}")
    assert np.array_equal(FeatureSet.load(tmp_path / f"f{suffix}").features, x)
    if suffix == ".npz":
        np.savez(tmp_path / "foreign.npz", X=x.astype(np.uint8), y=y)
    else:
        save_file({"X": x.astype(np.int64), "y": y}, tmp_path / "foreign.safetensors")
    assert np.array_equal(FeatureSet.load(tmp_path / f"foreign{suffix}").features, x)
    assert FeatureSet.from_arrays(x > 3, y).features.dtype == np.float32


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "no JSON object"),
        ({"class_names": "ab"}, "class_names is ab, expected list"),
        ({"class_names": ["a", 3]}, "class_names is"),
        ({"class_names": ["a"]}, "labels 0 to 1 but 1 class names"),
        ({"class_names": ["a", "b"], "card": 7}, "card is 7, expected dict"),
        ({"class_names": ["a", "b"], "card": {"x": float("inf")}}, "finite numbers"),
        ({"class_names": ["a", "b"], "card": {"checksum": "0"}}, "its checksum does not fit"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(header, words, tmp_path):
    arrays = {"features": np.ones((4, 2), np.float32), "labels": np.array([0, 0, 1, 1])}
    save_file(arrays, tmp_path / "f.safetensors", metadata={"header": json.dumps(header)})
    with pytest.raises(ValueError, match=words):
        FeatureSet.load(tmp_path / "f.safetensors")
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(tmp_path / "f.npz", header=text, **arrays)
    with pytest.raises(ValueError, match=words):
        FeatureSet.load(tmp_path / "f.npz")
