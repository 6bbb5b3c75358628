"""Train a backbone on the base classes with a cosine classifier (Baseline++, Chen et al. 2019).

Every random choice follows from (seed, epoch, step, process), so a run that was stopped and resumed
ends with the same weights as one that was not.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from .augment import normalise
from .batches import batches
from .files import load_tensors, save_tensors
from .head import prototype_loss
from .recipe import Recipe
from .state import Training

Validate = Callable[[nn.Module], dict[str, float]]


@torch.no_grad()
def class_means(backbone: nn.Module, images: np.ndarray, labels: np.ndarray, per_class: int = 100) -> Tensor:
    """Class weights `[C, channels, h, w]` for a trained backbone: the mean unit feature map of each class.

    `images` uint8 `[N, H, H, 3]`, of which at most `per_class` of every class are looked at.
    """
    backbone.eval()
    means = []
    for c in range(int(labels.max()) + 1):
        rows = np.flatnonzero(labels == c)
        rows = rows[:: -(-len(rows) // per_class)]
        maps = backbone.feature_map(normalise(torch.from_numpy(images[rows])))  # type: ignore[operator]
        means.append(F.normalize(maps.flatten(1), dim=1).view_as(maps).mean(0))
    weights = torch.stack(means)
    # as long as the random ones of a new head, so that a step of the optimiser turns them as far
    return F.normalize(weights.flatten(1), dim=1).view_as(weights) * weights[0].numel() ** 0.5


def keep_memory() -> None:
    """Ask the C library (glibc) to keep freed buffers up to 32 MB instead of returning them to the system.

    Activations are freed and taken again in every step; without this a tenth to a quarter of a CPU
    step goes into fresh, zeroed pages. Does nothing where there is no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # names in malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 2**31 - 1)


def freeze(backbone: nn.Module, average: nn.Module, count: int) -> None:
    """The first `count` blocks (and what comes before them) keep their averaged weights, the others learn."""
    blocks, averaged = _blocks(backbone), _blocks(average)
    first = len(blocks) - len(list(backbone.blocks))  # type: ignore[arg-type]
    if count >= len(blocks) - first:
        raise ValueError(f"{count} frozen blocks leave none of the backbone to learn; freeze fewer")
    for index, (block, kept) in enumerate(zip(blocks, averaged, strict=True)):
        block.frozen = index < count + first if count else False  # type: ignore[assignment]
        block.train(not block.frozen).requires_grad_(not block.frozen)
        if block.frozen:
            block.load_state_dict(kept.state_dict())


def _blocks(backbone: nn.Module) -> list[nn.Module]:
    """The stem, if there is one, and the blocks."""
    stem = [backbone.stem] if hasattr(backbone, "stem") else []
    return [*stem, *backbone.blocks]  # type: ignore[list-item, misc]


def train_epoch(
    run: Training, images: np.ndarray, labels: np.ndarray, bar: tqdm, rank: int, world: int
) -> dict[str, float]:
    """One pass over the data; mean loss and accuracy of this process's pictures."""
    recipe, epoch = run.recipe, run.epoch
    steps = len(labels) // recipe.stage_of(epoch).batch_size
    loss_sum = hits = seen = 0.0
    run.model.train()
    freeze(run.model.backbone, run.average, recipe.stage_of(epoch).frozen)
    forward: nn.Module = DistributedDataParallel(run.model) if world > 1 else run.model
    for step, (pictures, targets) in enumerate(batches(images, labels, recipe, epoch, rank, world)):
        pace = recipe.pace((epoch + step / steps) / recipe.epochs)
        targets = targets.to(run.device, non_blocking=True)
        scores, maps = forward(pictures.to(run.device, non_blocking=True))  # B C
        loss = F.cross_entropy(scores, targets, label_smoothing=recipe.label_smoothing)
        if recipe.prototypes:
            loss = loss + recipe.prototypes * prototype_loss(maps.flatten(1), targets)
        run.model.zero_grad(set_to_none=True)
        loss.backward()
        run.move(pace)
        run.update_average(epoch * steps + step)
        loss_sum += loss.item() * len(targets)
        hits += (scores.argmax(1) == targets).sum().item()
        seen += len(targets)
        bar.update(len(targets) * world)
        if step % 20 == 0:
            bar.set_postfix(
                epoch=epoch + 1, loss=f"{loss_sum / seen:.3f}", acc=f"{hits / seen:.3f}", refresh=False
            )
    if not math.isfinite(loss_sum):
        raise ValueError(f"the loss is not finite in epoch {epoch + 1}; lower --lr")
    return {"loss": loss_sum / seen, "accuracy": hits / seen}


def train(
    backbone: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    recipe: Recipe,
    out: Path,
    card: dict[str, Any],
    validate: Validate | None = None,
    resume: bool = False,
    device: torch.device | None = None,
    class_weights: Tensor | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, keep the best epoch's averaged weights in `out`, and return that file's card.

    Arguments:
        backbone: a module with `feature_map`, `[B, 3, H, W]` to `[B, channels, h, w]`.
        images: uint8 `[N, H, W, 3]`, in memory or memory-mapped. `labels`: int64 `[N]`, classes 0 … C - 1.
        card: what describes the run besides the recipe: `backbone`, `dataset`, … (JSON values).
        validate: accuracies of a backbone by name; the first one chooses the epoch. Without it the
            last epoch is kept.
        resume: continue from the checkpoint beside `out`, if there is one.
        class_weights: `[C, channels, S, S]` for the head to start from.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    _check(images, labels, recipe, world)
    keep_memory()
    classes = int(labels.max()) + 1
    card = {
        **card,
        "classes": classes,
        "images": len(labels),
        "recipe": _as_json(dataclasses.asdict(recipe)),
        "processes": world,
    }
    run = _begin(backbone, classes, recipe, device or torch.device("cpu"), class_weights)
    checkpoint = out.with_suffix(".checkpoint.safetensors")
    if resume and checkpoint.exists():
        run.load(checkpoint, card)
    if resume and rank == 0:
        resumed = f"resuming {checkpoint}: {run.epoch} of {recipe.epochs} epochs are done"
        log(resumed if run.epoch else f"there is no checkpoint {checkpoint}: starting from the first epoch")
    total, done = recipe.epochs * len(labels), run.epoch * len(labels)
    with tqdm(
        total=total, initial=done, unit="img", disable=None if rank == 0 else True, mininterval=2
    ) as bar:
        while run.epoch < recipe.epochs:
            entry = {"epoch": run.epoch + 1, **train_epoch(run, images, labels, bar, rank, world)}
            run.epoch += 1
            if rank == 0:
                entry |= validate(run.average) if validate else {}
                run.history.append(entry)
                if _is_best(run.history):
                    save_tensors(out, run.average.state_dict(), {**card, "kept": entry})
                run.save(checkpoint, card)
                log(" ".join(f"{k} {v:.4g}" for k, v in entry.items()) + f" scale {_scale(run):.2f}")
            if world > 1:
                dist.barrier()
    return load_tensors(out)[1] if rank == 0 else {}


def _begin(
    backbone: nn.Module, classes: int, recipe: Recipe, device: torch.device, class_weights: Tensor | None
) -> Training:
    """A run before its first step, whose head starts from `class_weights` if there are any."""
    run = Training(backbone, classes, recipe, device)
    if class_weights is not None:
        weight = run.model.head.weight
        if class_weights.shape != weight.shape:
            raise ValueError(
                f"the class weights to start from are {list(class_weights.shape)}, this data set needs "
                f"{list(weight.shape)}; start from the weights file of the backbone, not its checkpoint"
            )
        weight.data.copy_(class_weights)
    return run


def _is_best(history: list[dict[str, Any]]) -> bool:
    """Whether the last epoch beats all before it in its first validation figure (ties: the later one)."""
    figures = [name for name in history[-1] if name not in ("epoch", "loss", "accuracy")]
    if not figures:
        return True
    return bool(history[-1][figures[0]] >= max(entry[figures[0]] for entry in history))


def _scale(run: Training) -> float:
    return float(run.model.head.log_scale.detach().exp().mean())


def _as_json(value: Any) -> Any:
    """Tuples as lists, so that values compare equal before and after a round trip through JSON."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _check(images: np.ndarray, labels: np.ndarray, recipe: Recipe, world: int) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images are {images.dtype} {images.shape}; expected uint8 [N, H, W, 3]")
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images but {len(labels)} labels; expected one label per image")
    for stage in recipe.stages:
        if stage.batch_size > len(labels) or stage.batch_size % world:
            raise ValueError(
                f"batch size {stage.batch_size} does not fit {len(labels)} images on {world} processes; "
                "give a smaller one that the number of processes divides"
            )
