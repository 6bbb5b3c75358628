"""Training: learns, resumes to the same weights, survives being killed, works on two processes."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fewshot_dpkl import FeatureSet
from fewshot_dpkl.backbones import Recipe, Stage, build, load_backbone, train
from fewshot_dpkl.backbones.augment import normalise
from fewshot_dpkl.backbones.batches import batches, shuffled
from fewshot_dpkl.backbones.files import load_tensors
from fewshot_dpkl.backbones.recipe import OPTIMIZERS
from fewshot_dpkl.backbones.train import class_means
from fewshot_dpkl.commands import cli
from fewshot_dpkl.data import spread_per_class
from tests.conftest import ROOT, assert_refused
from tests.picture_files import make_cub, make_folder, zipped

TINY = Recipe(stages=(Stage(1, 16, 8), Stage(1, 32, 6), Stage(1, 32, 6, frozen=1)), lr=5e-3, average=0.8)
CARD = {"backbone": "conv4", "dataset": "made up", "preprocessing": {"resize": 32, "crop": 32}}


def coloured(count: int = 24, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Three classes, told apart by their bright channel."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 3
    images = rng.integers(0, 130, (count, size, size, 3), dtype=np.uint8)
    images[np.arange(count), :, :, labels] += 100
    return images, labels


def run(path, recipe=TINY, **options):
    return train(build("conv4"), *coloured(), recipe, path, CARD, log=lambda line: None, **options)


def test_training_learns_to_tell_colours_apart(tmp_path):
    recipe = dataclasses.replace(TINY, stages=(Stage(12, 16, 6),))
    card = run(tmp_path / "w.safetensors", recipe)
    assert card["kept"]["accuracy"] > 0.9
    assert card["kept"]["loss"] < 0.6


@pytest.mark.parametrize("name", ["conv4", "resnet10"])
def test_frozen_blocks_keep_their_averaged_weights_and_the_others_learn(name, tmp_path):
    seen = []

    def remember(average):
        seen.append({key: value.clone() for key, value in average.state_dict().items()})
        return {}

    recipe = dataclasses.replace(TINY, stages=(Stage(1, 32, 8), Stage(1, 32, 8, frozen=1)))
    train(build(name), *coloured(), recipe, tmp_path / "w.safetensors", CARD, validate=remember)
    first, second = seen
    moved = {key for key in first if "num_batches" not in key and not torch.equal(first[key], second[key])}
    early = {key for key in first if key.startswith(("blocks.0.", "stem."))}
    assert early.isdisjoint(moved)
    assert {key for key in first if key.endswith("weight")} - early <= moved


def test_class_weights_can_start_at_the_class_means():
    images, labels = coloured()
    backbone = build("conv4")
    weights = class_means(backbone, images, labels, per_class=3)
    for c in range(3):
        chosen = images[labels == c][::3]
        maps = backbone.feature_map(normalise(torch.from_numpy(chosen)))
        mean = torch.stack([one / one.norm() for one in maps]).mean(0)
        assert torch.cosine_similarity(weights[c].flatten(), mean.flatten(), dim=0) > 1 - 1e-6
        assert weights[c].norm() == pytest.approx(weights[c].numel() ** 0.5)


def test_the_best_epoch_is_kept(tmp_path):
    scores = iter(
        [{"1-nn": 50.0, "centroid": 1.0}, {"1-nn": 70.0, "centroid": 2.0}, {"1-nn": 60.0, "centroid": 99.0}]
    )
    card = run(tmp_path / "w.safetensors", validate=lambda model: next(scores))
    assert card["kept"]["epoch"] == 2
    assert card["kept"]["1-nn"] == 70.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_resumed_run_ends_with_the_same_weights(optimizer, stop_after, tmp_path):
    recipe = dataclasses.replace(TINY, optimizer=optimizer)
    run(tmp_path / "whole.safetensors", recipe)
    finished = []

    def stop(model):
        finished.append(model)
        if len(finished) > stop_after:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts.safetensors", recipe, validate=stop)
    run(tmp_path / "parts.safetensors", recipe, resume=True)
    for suffix in (".safetensors", ".checkpoint.safetensors"):
        whole, whole_card = load_tensors(tmp_path / f"whole{suffix}")
        parts, parts_card = load_tensors(tmp_path / f"parts{suffix}")
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
        assert whole_card == parts_card


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path / "w.safetensors")
    with pytest.raises(
        ValueError, match=r"written with --lr 0.005, this run has 0.001; give the same options to resume"
    ):
        run(tmp_path / "w.safetensors", dataclasses.replace(TINY, lr=1e-3), resume=True)
    card = {**CARD, "backbone": "conv6"}
    with pytest.raises(ValueError, match="written with backbone conv4, this run has conv6"):
        train(build("conv6"), *coloured(), TINY, tmp_path / "w.safetensors", card, resume=True)


def test_an_epoch_shows_every_picture_once_and_in_an_order_of_its_own():
    images, labels = coloured()
    images[:] = np.arange(len(images), dtype=np.uint8)[
        :, None, None, None
    ]  # a picture's colour is its number
    recipe = dataclasses.replace(TINY, jitter=0.0)
    seen = []
    for epoch in (1, 2):
        views = torch.cat([views for views, _ in batches(images, labels, recipe, epoch)])
        colours = (views[:, 0, 0, 0] * 0.229 + 0.485) * 255
        seen.append(colours.round().int().tolist())
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(24))
    assert seen[0] != seen[1]


def test_four_pictures_of_a_class_stand_together_where_neighbours_count(tmp_path):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [8, 9, 4]))
    order, other = (shuffled(labels, 4, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert sorted(order) == sorted(other) == list(range(21))
    assert order.tolist() != other.tolist()
    runs = [len(list(group)) for _, group in itertools.groupby(labels[order])]
    assert all(length % 4 in (0, 1) for length in runs)  # one picture of class 1 is left over
    card = run(tmp_path / "w.safetensors", dataclasses.replace(TINY, neighbours=1.0))
    assert card["kept"]["loss"] > run(tmp_path / "plain.safetensors")["kept"]["loss"] + 0.1


def test_processes_share_each_batch():
    images, labels = coloured()
    alone = [sorted(targets.tolist()) for _, targets in batches(images, labels, TINY, 0)]
    shares = zip(batches(images, labels, TINY, 0, 0, 2), batches(images, labels, TINY, 0, 1, 2), strict=True)
    assert alone == [sorted(torch.cat([a[1], b[1]]).tolist()) for a, b in shares]


def test_the_learning_rate_goes_up_and_down_once():
    recipe = dataclasses.replace(TINY, warmup=0.25)
    rates = [recipe.pace(progress) for progress in np.linspace(0, 1, 101)]
    assert rates[25] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert all(a < b for a, b in itertools.pairwise(rates[:26]))
    assert all(a > b for a, b in itertools.pairwise(rates[25:]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"optimizer": "magic"}, "choose muon, adamw, sgd"),
        ({"neighbours": -1.0}, "expected a weight of 0 or more"),
        ({"stages": (Stage(1, 8, 8),)}, "pictures need 16 pixels"),
        ({"stages": (Stage(1, 16, 8, frozen=4),)}, "4 frozen blocks leave none of the backbone to learn"),
        ({"stages": (Stage(1, 16, 100),)}, "batch size 100 does not fit 24 images"),
    ],
)
def test_impossible_recipes_are_refused(change, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        run(tmp_path / "w.safetensors", dataclasses.replace(TINY, **change))
    assert list(tmp_path.iterdir()) == []


def _train_in_process(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    backbone = build("conv4", seed=rank)  # DDP starts both from the weights of process 0
    train(backbone, *coloured(), TINY, ROOT / folder / "w.safetensors", CARD, log=lambda line: None)
    np.savez(f"{folder}/{rank}.npz", **{name: value.detach() for name, value in backbone.named_parameters()})
    dist.destroy_process_group()


def test_two_processes_train_one_model(tmp_path):
    torch.multiprocessing.spawn(_train_in_process, (str(tmp_path),), nprocs=2)
    first, second = np.load(tmp_path / "0.npz"), np.load(tmp_path / "1.npz")
    start = dict(build("conv4", seed=0).named_parameters())
    for name in first.files:
        assert np.array_equal(first[name], second[name])
        assert not np.array_equal(first[name], start[name].detach())
    assert load_tensors(tmp_path / "w.safetensors")[1]["processes"] == 2


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
