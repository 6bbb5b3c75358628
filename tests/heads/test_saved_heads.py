"""A fitted head in one file: same predictions bit for bit, anything else refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from fewshot_dpkl import HEADS, load_head
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
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            description = json.loads(file.metadata()["fewshot_dpkl"])
        save_file(load_file(path), path, metadata={"fewshot_dpkl": json.dumps({**description, **changes})})
    return path


def test_features_of_another_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match="X has 31 features, but CentroidHead is expecting 30 features"):
        load_head(saved(tmp_path)).predict(np.ones((2, 31)))


def test_other_versions_other_files_and_no_file_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="head format 99, this version of fewshot-dpkl reads format 1; fit and save"
    ):
        load_head(saved(tmp_path, version=99))
    with pytest.raises(ValueError, match="no head 'svm'"):
        load_head(saved(tmp_path, head="svm"))
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"not a head at all")
    with pytest.raises(ValueError, match=r"other.safetensors is not a saved head; write one with head.save"):
        load_head(other)
    with pytest.raises(FileNotFoundError, match="no saved head at"):
        load_head(tmp_path / "nowhere.safetensors")


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    x, y, _, _ = task()
    head = quick("centroid").fit(x, y)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fewshot_dpkl.heads.base.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        head.save(tmp_path / "head.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_head_is_as_readable_as_any_file(tmp_path):
    x, y, _, _ = task()
    quick("nn").fit(x, y).save(tmp_path / "head.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "head.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
