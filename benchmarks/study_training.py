"""What else a Conv-4 could be trained by: short runs of one length and seed, on val classes alone.

    python benchmarks/study_training.py
    python benchmarks/study_training.py --dataset cub --pictures 40000 --seeds 0 1

Every run goes on from the shipped weights, with class weights from the class means, a first block that
learns no more and products in bfloat16. Prints 5-way accuracy of the nearest class mean at one and five
shots, with all looks of the shipped backbone, before and after, paired with the cross-entropy alone.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshot_dpkl import CentroidHead, EpisodeSampler, FeatureSet, HeadResult, evaluate, paired_difference
from fewshot_dpkl.backbones import Recipe, Stage, extract_features, load_backbone
from fewshot_dpkl.backbones.augment import random_crops
from fewshot_dpkl.backbones.batches import batches
from fewshot_dpkl.backbones.extract import Extractor
from fewshot_dpkl.backbones.head import prototype_loss
from fewshot_dpkl.backbones.state import Training
from fewshot_dpkl.backbones.train import class_means, freeze, keep_memory
from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.data import load_pixels, open_split, spread_per_class

Loss = Callable[[Training, Tensor, Tensor], Tensor]
"""Of a run, pictures `[B, 3, S, S]` and their classes `[B]`."""


def plain(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy alone: Baseline++."""
    return F.cross_entropy(training.model(pictures)[0], targets)


def prototypes(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """And the nearest mean of the other pictures of a class in the batch (`--prototypes 1`)."""
    scores, maps = training.model(pictures)
    return F.cross_entropy(scores, targets) + prototype_loss(maps.flatten(1), targets)


def rotation(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """And, for half of the batch, which of four ways up a picture stands (Gidaris et al., 2019)."""
    half = len(pictures) // 2
    turns = torch.arange(half) % 4
    turned = torch.stack([one.rot90(int(k), (1, 2)) for one, k in zip(pictures[:half], turns, strict=True)])
    both = torch.cat([pictures, turned]).contiguous(memory_format=torch.channels_last)
    scores, maps = training.model(both)
    layer = training.model.turns  # put there by `train`
    guess = layer(10 * F.normalize(maps[len(pictures) :].flatten(1), dim=1))
    return F.cross_entropy(scores[: len(pictures)], targets) + F.cross_entropy(guess, turns) / 2


def distillation(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """And what the first weights say of the picture and its mirror image, sharpened by half."""
    scores, _ = training.model(pictures)
    with torch.no_grad():
        teacher = training.model.teacher  # put there by `train`
        guess = (teacher(pictures)[0] + teacher(pictures.flip(3))[0]) / 2
    told = F.kl_div(scores.log_softmax(1), (1.5 * guess).softmax(1), reduction="batchmean")
    return (F.cross_entropy(scores, targets) + told) / 2


def whole(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy alone, on boxes of at least 0.8 of a picture."""
    return plain(training, pictures, targets)


def mixup(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of pictures mixed in pairs, before a block drawn by lot (Verma et al., 2019)."""
    blocks = training.model.backbone.blocks
    order, share = torch.randperm(len(targets)), float(torch.rand(3).median())  # as Beta(2, 2)
    here, x = int(torch.randint(len(blocks), ())), pictures
    with torch.autocast("cpu", torch.bfloat16):
        for number, block in enumerate(blocks):
            if number == here:
                x = torch.lerp(x[order], x, share).contiguous(memory_format=torch.channels_last)
            x = block(x)
    scores = training.model.head(x.float())
    return share * F.cross_entropy(scores, targets) + (1 - share) * F.cross_entropy(scores, targets[order])


def views(training: Training, pictures: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the mean map of four crops of a picture, for a quarter of the batch."""
    quarter = len(pictures) // 4
    crops = random_crops(pictures[:quarter].repeat_interleave(4, 0), pictures.shape[2], (0.6, 1.0))
    _, maps = training.model(crops.contiguous(memory_format=torch.channels_last))
    return F.cross_entropy(training.model.head(maps.unflatten(0, (-1, 4)).mean(1)), targets[:quarter])


LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (plain, whole, prototypes, rotation, distillation, mixup, views)
}


def train(
    dataset: str, loss: Loss, pixels: np.ndarray, labels: np.ndarray, count: int, rate: float, seed: int
) -> nn.Module:
    """The averaged backbone after `count` pictures of 84 pixels, at rates that end at zero."""
    epochs = -(-count // len(labels))
    together = loss is prototypes  # four pictures of a class stand together
    batch_size = 64 if together or loss is views else 32
    recipe = Recipe(
        stages=(Stage(epochs, 84, batch_size, frozen=1),),
        lr=rate / 5,
        filter_lr=rate,
        warmup=0.05,
        learn_scale=False,
        prototypes=float(together),
        area=(0.8 if loss is whole else 0.5 if dataset == "mini-imagenet" else 0.35, 1.0),
        jitter=0.2,
        precision="bfloat16",
        seed=seed,
    )
    backbone = load_backbone(f"conv4-{dataset}").module.requires_grad_(True)
    training = Training(backbone, int(labels.max()) + 1, recipe, torch.device("cpu"))
    margin = (pixels.shape[1] - 84) // 2
    middle = pixels[:, margin : margin + 84, margin : margin + 84]
    training.model.head.weight.data.copy_(class_means(backbone, middle, labels, 50))
    extra: list[Tensor] = []
    if loss is rotation:
        training.model.turns = nn.Linear(1600, 4)
        extra = list(training.model.turns.parameters())
    if loss is distillation:
        training.model.teacher = copy.deepcopy(training.model).eval().requires_grad_(False)
    layer = torch.optim.AdamW(extra, lr=2e-3) if extra else None
    steps = count // batch_size
    for step, (pictures, targets) in enumerate(each(pixels, labels, recipe, steps)):
        if step % (len(labels) // batch_size) == 0:
            training.model.backbone.train()
            freeze(training.model.backbone, training.average, 1)
        training.model.zero_grad(set_to_none=True)
        loss(training, pictures, targets).backward()
        training.move(recipe.pace(step / steps))
        if layer:
            layer.step()
        training.update_average(10_000 + step)
    return training.average


def each(
    pixels: np.ndarray, labels: np.ndarray, recipe: Recipe, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """So many batches, over as many epochs as that takes."""
    taken = 0
    for epoch in range(recipe.epochs):
        for batch in batches(pixels, labels, recipe, epoch):
            if taken == steps:
                return
            taken += 1
            yield batch


def results(backbone: Extractor, pixels: np.ndarray, labels: np.ndarray) -> list[HeadResult]:
    """Of the nearest class mean at one and at five shots."""
    rows = extract_features(backbone, pixels)
    features = FeatureSet.from_arrays(rows, labels)
    samplers = (EpisodeSampler(features, shot=shot, query=15, seed=1) for shot in (1, 5))
    return [evaluate({"": CentroidHead()}, features, sampler, 1000)[""] for sampler in samplers]


def row(name: str, found: list[HeadResult], against: list[HeadResult]) -> str:
    cells = []
    for result, other in zip(found, against, strict=True):
        difference, interval = paired_difference(result, other)
        gain = f" ({100 * difference:+.2f} ± {100 * interval:.2f})" if difference else ""
        cells.append(f"{100 * result.accuracy.mean():.2f}{gain}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", action="append", choices=["mini-imagenet", "cub"], help="default: both")
    parser.add_argument("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    parser.add_argument("--pictures", type=int, default=8000, help="in a run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.003, help="of the filters (default: %(default)s)")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    keep_memory()
    print("| val classes of | trained on by | 1 shot | 5 shots |\n| --- | --- | --- | --- |")
    for dataset in arguments.dataset or ["mini-imagenet", "cub"]:
        base = open_split(dataset, "base", arguments.data_root)
        val = open_split(dataset, "val", arguments.data_root)
        pixels = load_pixels(base, 84 if dataset == "mini-imagenet" else 96)
        chosen = spread_per_class(val.labels, 60 if dataset == "mini-imagenet" else 30)
        shipped = load_backbone(f"conv4-{dataset}")
        asked = load_pixels(val, shipped.resize)[chosen], val.labels[chosen]
        before = results(shipped, *asked)
        print(row(f"{dataset} | nothing: the shipped weights", before, before), flush=True)
        for seed in arguments.seeds:
            alone = before
            for name in arguments.losses:
                trained = train(
                    dataset, LOSSES[name], pixels, base.labels, arguments.pictures, arguments.rate, seed
                )
                found = results(shipped.like(trained), *asked)
                alone = found if name == "plain" else alone
                print(row(f"{dataset} | {name}, seed {seed}", found, alone), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
