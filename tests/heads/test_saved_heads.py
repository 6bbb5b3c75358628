"""A fitted head in one file: same predictions bit for bit, anything else refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fewshot_dpkl import HEADS, load_head
from fewshot_dpkl.schema import seal
from tests.heads.test_heads import quick, task


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_loaded_head_predicts_the_same_bits_in_a_fresh_process(name, tmp_path):
    x, y, xq, _ = task()
    labels = np.array(["c", "a", "d", "b"])[y]
    head = quick(name).fit(x, labels)
    head.save(tmp_path / "head.safetensors")
    np.save(tmp_path / "q.npy", xq)
    code = (
        "import sys, numpy as np; from fewshot_dpkl import load_head; folder = sys.argv[1]\n"
        "head = load_head(folder + '/head.safetensors'); q = np.load(folder + '/q.npy')\n"
        "np.savez(folder + '/out.npz', p=head.predict_proba(q), y=head.predict(q))"
    )
    if name != "dpkl":  # one fresh process is enough; the others are read here
        loaded = load_head(tmp_path / "head.safetensors")
        p, labels_out = loaded.predict_proba(xq), loaded.predict(xq)
        assert loaded.get_params() == {
            **head.get_params(),
            **{k: 0 for k in head.get_params() if k == "random_state"},
        }
    else:
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={"OMP_NUM_THREADS": "1"})
        out = np.load(tmp_path / "out.npz")
        p, labels_out = out["p"], out["y"]
    assert np.array_equal(p, head.predict_proba(xq))
    assert np.array_equal(labels_out, head.predict(xq))


@pytest.mark.parametrize(
    "labels", [[3, -1, 7, 0], [0.0, 1.0, 5.0, 4.0], ["é", "b", "a", "z"], [True, False, True, False]]
)
def test_labels_keep_their_type(labels, tmp_path):
    x, y, xq, _ = task()
    head = quick("centroid").fit(x, np.array(labels)[y])
    head.save(tmp_path / "h.safetensors")
    loaded = load_head(tmp_path / "h.safetensors")
    assert loaded.predict(xq).dtype == head.predict(xq).dtype
    assert np.array_equal(loaded.predict(xq), head.predict(xq))


def saved(tmp_path, **changes):
    x, y, _, _ = task()
    path = tmp_path / "head.safetensors"
    quick("centroid").fit(x, y).save(path)
    if changes:
        with safe_open(path, "pt") as file:
            description = json.loads(file.metadata()["fewshot_dpkl"])
        save_file(load_file(path), path, metadata={"fewshot_dpkl": json.dumps({**description, **changes})})
    return path


def test_features_of_another_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match="X has 31 features, but CentroidHead is expecting 30 features"):
        load_head(saved(tmp_path)).predict(np.ones((2, 31)))


def test_other_versions_other_files_and_no_file_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="head format 99, this version of fewshot-dpkl reads format 2; fit and save"
    ):
        load_head(saved(tmp_path, version=99))
    with pytest.raises(ValueError, match="a head 'svm', but there is no head of that name"):
        load_head(saved(tmp_path, head="svm"))
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"not a head at all")
    with pytest.raises(ValueError, match=r"other.safetensors is not a saved head; write one with head.save"):
        load_head(other)
    with pytest.raises(FileNotFoundError, match="no saved head at"):
        load_head(tmp_path / "nowhere.safetensors")


def altered(path, change, resealed):
    """The file with another header, by damage or (`resealed`) by a person who knows the format."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = change(json.loads(file.metadata()["fewshot_dpkl"]))
    if resealed and isinstance(header, dict):
        header["checksum"] = seal(header, tensors)
    save_file(tensors, path, metadata={"fewshot_dpkl": json.dumps(header)})


@pytest.mark.parametrize("resealed", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: [header], "its header is no JSON object"),
        (lambda header: {k: v for k, v in header.items() if k != "head"}, "head is missing"),
        (lambda header: {k: v for k, v in header.items() if k != "parameters"}, "parameters is missing"),
        ({"head": 7}, "head is 7, expected str"),
        ({"parameters": []}, r"parameters is \[\], expected dict"),
        ({"parameters": {"scale": "10"}}, "its parameter scale is 10, expected float"),
        ({"parameters": {"scale": float("nan")}}, "not JSON with finite numbers"),
        ({"parameters": {"scale": True}}, "its parameter scale is True"),
        ({"parameters": {"depth": 3}}, "CentroidHead has no parameter depth"),
        ({"parameters": {"scale": 10**25}}, "not JSON with finite numbers"),
        ({"classes_dtype": "<q9"}, "the type of its classes is <q9"),
        ({"classes_dtype": "<U99999999"}, "the type of its classes is <U99999999"),
        ({"classes_dtype": "V8"}, "the type of its classes is V8"),
        ({"classes_dtype": "<i1", "classes": [0, 1, 2, 300]}, "its classes do not fit the type <i1"),
        ({"classes": ["a", "b", "c", "d"]}, "its classes are not all of type"),
        ({"classes": [0, 1, 300]}, "the order of its 3 classes"),
        ({"classes": [0, 1, 2, 2]}, "4 classes, expected at least two, each once"),
        ({"classes": 7}, "classes is 7, expected list"),
        ({"order": [0, 1, 2, 9]}, "the order of its 4 classes"),
        ({"order": [0, 1, 2]}, "the order of its 4 classes"),
        ({"order": [0, 1, 2, "3"]}, "order is "),
        ({"n_features": 31}, "its checksum does not fit|it has 31 features"),
        ({"n_features": 10**15}, "its checksum does not fit|it has 1000000000000000 features"),
        ({"state": {}}, "it holds centroids, expected nothing"),
        ({"state": {"centroids": [1, 4, 31]}}, r"the shape \[1, 4, 30\], expected \[1, 4, 31\]"),
        ({"state": {"centroids": 3}}, "the shapes in its header are no lists"),
        ({"head": "dpkl", "parameters": {}}, "its checksum does not fit|its tensors are not those of a dpkl"),
    ],
)
def test_an_altered_header_is_refused_in_a_sentence(change, words, resealed, tmp_path):
    path = saved(tmp_path)
    altered(path, change if callable(change) else lambda header: {**header, **change}, resealed)
    with pytest.raises(ValueError, match=words) as caught:
        load_head(path)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"centroids": torch.zeros(1, 5, 30)}, r"the shape \[1, 5, 30\], expected \[1, 4, 30\]"),
        ({"others": torch.zeros(1, 4, 30)}, "it holds others, expected centroids"),
        ({"centroids": torch.zeros(1, 4, 30), "more": torch.zeros(1)}, "it holds centroids, more, expected"),
        ({"centroids": torch.full((1, 4, 30), torch.nan)}, "centroids holds values that are not finite"),
        ({"centroids": torch.zeros(1, 4, 30, dtype=torch.complex64)}, "centroids is of type complex64"),
    ],
)
def test_other_tensors_are_refused_in_a_sentence(tensors, words, tmp_path):
    path = saved(tmp_path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=words):
        load_head(path)


def test_tensors_that_cannot_answer_are_refused_whatever_the_header_says(tmp_path):
    path = saved(tmp_path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fewshot_dpkl"])
    for tensors in ({"centroids": torch.zeros(1, 5, 30)}, {"others": torch.zeros(1, 4, 30)}):
        header["state"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
        header["checksum"] = seal(header, tensors)
        save_file(tensors, path, metadata={"fewshot_dpkl": json.dumps(header)})
        with pytest.raises(ValueError, match="its tensors are not those of a centroid with 4 classes"):
            load_head(path)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    x, y, _, _ = task()
    head = quick("centroid").fit(x, y)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fewshot_dpkl.heads.saved.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        head.save(tmp_path / "head.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_head_is_as_readable_as_any_file(tmp_path):
    x, y, _, _ = task()
    quick("nn").fit(x, y).save(tmp_path / "head.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "head.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
