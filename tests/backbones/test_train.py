"""Training a backbone: it learns, resumes to the same weights, and shares a batch among processes."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fewshot_dpkl.backbones import Recipe, Stage, build, train
from fewshot_dpkl.backbones.augment import normalise
from fewshot_dpkl.backbones.batches import batches, shuffled
from fewshot_dpkl.backbones.files import load_tensors
from fewshot_dpkl.backbones.recipe import OPTIMIZERS, PRECISIONS
from fewshot_dpkl.backbones.state import Training, options
from fewshot_dpkl.backbones.train import class_means
from tests.conftest import ROOT

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


def test_half_the_precision_of_products_gives_nearly_the_same_gradients():
    pictures, targets = torch.randn(8, 3, 32, 32), torch.arange(8) % 3
    gradients = []
    for precision in PRECISIONS:
        training = Training(
            build("conv4"), 3, dataclasses.replace(TINY, precision=precision), torch.device("cpu")
        )
        training.model.train()
        scores, maps = training.model(pictures)
        torch.nn.functional.cross_entropy(scores, targets).backward()
        assert scores.dtype == maps.dtype == torch.float32
        gradients.append([p.grad for p in training.model.parameters() if p.grad is not None])
    for exact, rough in zip(*gradients, strict=True):
        assert rough.dtype == torch.float32
        assert torch.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.97
        assert not torch.equal(exact, rough)


def test_a_checkpoint_that_does_not_name_a_newer_option_was_written_with_its_default():
    recipe = dataclasses.asdict(TINY)
    del recipe["precision"]
    assert options({"recipe": recipe})["--precision"] == "float32"


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


def test_four_pictures_of_a_class_stand_together_where_prototypes_count(tmp_path):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [8, 9, 4]))
    order, other = (shuffled(labels, 4, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert sorted(order) == sorted(other) == list(range(21))
    assert order.tolist() != other.tolist()
    runs = [len(list(group)) for _, group in itertools.groupby(labels[order])]
    assert all(length % 4 in (0, 1) for length in runs)  # one picture of class 1 is left over
    card = run(tmp_path / "w.safetensors", dataclasses.replace(TINY, prototypes=1.0))
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
        ({"prototypes": -1.0}, "expected a weight of 0 or more"),
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
