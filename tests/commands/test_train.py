"""fewshot-dpkl train, extract and prepare: killed and resumed, refused in a sentence."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from fewshot_dpkl import FeatureSet
from fewshot_dpkl.backbones import load_backbone
from fewshot_dpkl.backbones.files import load_tensors
from fewshot_dpkl.commands import cli
from fewshot_dpkl.data import spread_per_class
from tests.conftest import ROOT, assert_refused
from tests.picture_files import make_cub, make_folder, zipped


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """A folder data set, and a cache for its decoded pictures."""
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    return make_folder(tmp_path / "shapes", {"base": 3, "val": 5, "novel": 5}, per_class=20)


@pytest.fixture
def script(monkeypatch):
    """Run a command inside this process, which saves loading torch again."""

    def call(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        cli.run(importlib.import_module(f"fewshot_dpkl.commands.{name}").main)

    return call


def options(shapes, out, epochs):
    kind = ("--dataset", f"folder:{shapes}", "--stages", "16:8:1", "--threads", 1, "--device", "cpu")
    return [*map(str, kind), "--out", str(out), "--epochs", str(epochs)]


def test_a_killed_run_leaves_a_checkpoint_that_loads_and_resumes(shapes, tmp_path, script, capsys):
    out, checkpoint = tmp_path / "w.safetensors", tmp_path / "w.checkpoint.safetensors"
    command = [sys.executable, str(ROOT / "scripts" / "train_backbone.py"), *options(shapes, out, 8)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("epoch 2 "):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    load_backbone(out)
    load_backbone(checkpoint)
    epoch = load_tensors(checkpoint)[1]["epoch"]
    assert 2 <= epoch < 8
    script("train", *options(shapes, out, 8), "--resume")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resuming {checkpoint}: {epoch} of 8 epochs are done"
    assert lines[1].startswith(f"epoch {epoch + 1} ")
    assert load_tensors(checkpoint)[1]["epoch"] == 8


def test_trained_weights_are_overwritten_only_when_asked(shapes, tmp_path, run_command):
    out, checkpoint = tmp_path / "w.safetensors", tmp_path / "w.checkpoint.safetensors"
    first = run_command("train", *options(shapes, out, 1), "--resume")
    assert (
        first.stdout.splitlines()[0] == f"there is no checkpoint {checkpoint}: starting from the first epoch"
    )
    before = out.read_bytes(), checkpoint.read_bytes()
    again = run_command("train", *options(shapes, out, 1))
    assert_refused(again, "w.safetensors exists; --resume continues that run, --overwrite trains anew")
    more = run_command("train", *options(shapes, out, 2), "--resume")
    assert_refused(more, "was written with --epochs 1, this run has 2; give the same options")
    other = run_command("train", *options(shapes, out, 1), "--resume", "--fixed-scale")
    assert_refused(other, "was written with --fixed-scale False, this run has True")
    both = run_command("train", *options(shapes, out, 1), "--resume", "--overwrite")
    assert_refused(both, "give one of them")
    assert (out.read_bytes(), checkpoint.read_bytes()) == before
    done = run_command("train", *options(shapes, out, 1), "--resume")
    assert done.stdout.splitlines()[0] == f"resuming {checkpoint}: 1 of 1 epochs are done"
    assert run_command("train", *options(shapes, out, 1), "--overwrite", "--seed", 1).returncode == 0
    assert out.read_bytes() != before[0]


def test_from_pictures_to_features_by_script(shapes, tmp_path, script):
    weights = tmp_path / "w.safetensors"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*torchrun, "scripts/train_backbone.py", *options(shapes, weights, 1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1 loss") == 1  # one of the two processes reports
    for source, out in (
        (shapes / "novel", "folder.npz"),
        (zipped(shapes / "novel", tmp_path / "n.zip"), "zip.npz"),
    ):
        script(
            "extract",
            "--backbone",
            weights,
            "--images",
            source,
            "--out",
            tmp_path / out,
            "--threads",
            1,
        )
    from_folder, from_zip = FeatureSet.load(tmp_path / "folder.npz"), FeatureSet.load(tmp_path / "zip.npz")
    assert from_folder.features.shape == (100, 1600)
    assert np.array_equal(from_folder.features, from_zip.features)
    assert np.array_equal(from_folder.labels, np.repeat(np.arange(5), 20))
    few_each = ("--dataset", f"folder:{shapes}", "--per-class", 5, "--dtype", "float16", "--threads", 1)
    script("extract", "--backbone", weights, *few_each, "--out", tmp_path / "few.safetensors")
    few = FeatureSet.load(tmp_path / "few.safetensors")
    assert few.features.dtype == np.float16
    assert np.abs(few.features - from_folder.features[spread_per_class(from_folder.labels, 5)]).max() < 1e-2
    assert few.card["backbone"]["recipe"]["stages"] == [
        {"epochs": 1, "size": 16, "batch_size": 8, "frozen": 0}
    ]
    small = ("--images", shapes / "novel", "--size", 48, "--out", tmp_path / "small.npz", "--threads", 1)
    script("extract", "--backbone", weights, *small)
    resized = FeatureSet.load(tmp_path / "small.npz")
    assert resized.features.shape == (100, 64 * 3 * 3)
    assert resized.card["backbone"]["preprocessing"]["crop"] == 48


def test_training_goes_on_from_another_backbone(shapes, tmp_path, script, capsys):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    script("train", *options(shapes, first, 1))
    still = ("--lr", 0, "--optimizer", "adamw", "--average", 0, "--continue-from", first)
    script("train", *options(shapes, second, 1), *still)
    before, after = load_tensors(first)[0], load_tensors(second)
    assert all(after[0][name].equal(before[name]) for name in before if name.endswith("conv.weight"))
    assert after[1]["start"]["name"] == str(first)
    assert after[1]["start"]["recipe"] == load_tensors(first)[1]["recipe"]
    checkpoint = first.with_suffix(".checkpoint.safetensors")
    script("train", *options(shapes, second, 1), *still[:-1], checkpoint, "--overwrite")
    heads = (load_tensors(file.with_suffix(".checkpoint.safetensors"))[0] for file in (first, second))
    assert next(heads)["model.head.weight"].equal(next(heads)["model.head.weight"])
    with pytest.raises(SystemExit):
        script(
            "train",
            *options(shapes, second, 1),
            "--continue-from",
            first,
            "--backbone",
            "conv6",
            "--overwrite",
        )
    assert "is a conv4, this run trains a conv6" in capsys.readouterr().err


def test_scripts_refuse_bad_input_in_one_sentence(shapes, tmp_path, script, capsys):
    def refused(*command: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            script(*command)
        assert stopped.value.code == 2
        error = capsys.readouterr().err.strip()
        *passed_over, line = error.splitlines()
        assert all(before.startswith("passed over ") for before in passed_over)
        assert line.startswith("error: ")
        return str(error)

    out = tmp_path / "w.safetensors"
    assert "--epochs is 0; expected at least 1" in refused("train", *options(shapes, out, 0))
    elsewhere = ("--dataset", "cub", "--data-root", tmp_path)
    assert "there is no" in refused("train", *options(shapes, out, 1), *elsewhere)
    broken = next((shapes / "val").rglob("*.png"))
    broken.write_bytes(b"no picture")
    short = refused("train", *options(shapes, out, 1))
    assert f"/{broken.name}: no picture in a known format" in short
    assert "has 19 examples" in short
    broken.unlink()
    assert "expected SIZE:BATCH:SHARE" in refused("train", *options(shapes, out, 1), "--stages", "64")
    missing = refused("prepare", "--dataset", "mini-imagenet", "--source", shapes)
    assert "has no train.csv; get the" in missing
    assert "ends in .npz" in refused("extract", "--images", shapes, "--out", "x.txt")
    assert "no backbone 'nothing'" in refused(
        "extract", "--backbone", "nothing", "--images", shapes, "--out", tmp_path / "x.npz"
    )
    assert "--size is 8; expected at least 16" in refused(
        "extract", "--images", shapes / "val", "--size", 8, "--out", tmp_path / "x.npz"
    )
    assert not out.exists()
    assert not (tmp_path / "x.npz").exists()


def test_prepare_data_counts_what_is_there(tmp_path, script, capsys, monkeypatch):
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEWSHOT_DPKL_DATA", str(tmp_path / "empty"))
    script("prepare", "--dataset", "cub", "--source", make_cub(tmp_path / "birds"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["cub base: 100 classes, 100 pictures", "cub val: 50 classes, 50 pictures"]
    assert lines[3].startswith(f"all is there; move or link it to {tmp_path / 'empty' / 'cub'}")


def test_a_full_disk_is_reported_and_leaves_nothing(shapes, tmp_path, script, capsys):
    """Files of more than 100 kB cannot be written: the decoded pictures are there already, weights fail."""
    out = tmp_path / "out" / "w.safetensors"
    script("train", *options(shapes, out, 1))
    for file in out.parent.iterdir():
        file.unlink()
    capsys.readouterr()
    resource = pytest.importorskip("resource", reason="limits of a process are those of POSIX")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SystemExit) as stopped:
            script("train", *options(shapes, out, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stopped.value.code == 2
    assert "cannot write" in (error := capsys.readouterr().err)
    assert "File too large; nothing was changed there" in error
    assert list(out.parent.iterdir()) == []
