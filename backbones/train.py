"""Train a backbone on the base classes with a cosine classifier (Baseline++, Chen et al. 2019).

Every random choice follows from (seed, epoch, step, process), so a run that was stopped and resumed
ends with the same weights as one that was not.
"""

from __future__ import annotations

import copy
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

from fewshot_dpkl.schema import Source, matches

from .augment import normalise
from .batches import batches
from .files import load_tensors, save_tensors
from .head import CosineClassifier, neighbour_loss
from .muon import Muon, fits_muon
from .recipe import Recipe

IDENTITY = ("backbone", "start", "dataset", "classes", "images", "recipe", "processes")
"""The entries of a card that must agree for a run to be resumed."""
Validate = Callable[[nn.Module], dict[str, float]]


class Classifier(nn.Module):
    """Backbone and head as one module, so that data-parallel training sees one forward pass."""

    def __init__(self, backbone: nn.Module, head: CosineClassifier) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, 3, H, W]` to scores `[B, C]` and feature maps `[B, channels, h, w]`."""
        feature_map = self.backbone.feature_map(images)  # type: ignore[operator]
        return self.head(feature_map), feature_map


class Training:
    """The state of a run: model, optimiser, averaged backbone, epoch, history; saved after every epoch."""

    def __init__(self, backbone: nn.Module, classes: int, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        with torch.no_grad():
            was_training, probe = backbone.training, torch.zeros(1, 3, 84, 84)
            shape = backbone.eval().feature_map(probe).shape  # type: ignore[operator]
            backbone.train(was_training)
        head = CosineClassifier(classes, shape[1], shape[2], recipe.scale)
        head.log_scale.requires_grad_(recipe.learn_scale)
        self.model = Classifier(backbone, head).to(device).to(memory_format=torch.channels_last)
        self.average = copy.deepcopy(self.model.backbone).eval()
        self.optimizers = make_optimizers(self.model, recipe)
        self.epoch = 0
        self.history: list[dict[str, Any]] = []

    def move(self, pace: float) -> None:
        """One step of the optimisers at a share `pace` of their full rates."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = pace * optimizer.defaults["lr"]
            optimizer.step()

    def update_average(self, step: int) -> None:
        """Move the averaged backbone (weights and batch-norm statistics) towards the current one."""
        kept = min(self.recipe.average, step / (step + 10))  # forget the random start quickly
        pairs = zip(
            self.average.state_dict().values(), self.model.backbone.state_dict().values(), strict=True
        )
        averaged, current = zip(*((a, b) for a, b in pairs if a.is_floating_point()), strict=True)
        torch._foreach_lerp_(averaged, current, 1 - kept)

    def save(self, path: Path, card: dict[str, Any]) -> None:
        """Everything `load` needs, in one file; `card` describes the run."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    if value is not None:  # SGD without a momentum yet
                        tensors[f"optimizer{number}.{index}.{name}"] = torch.as_tensor(value)
        save_tensors(path, tensors, {**card, "epoch": self.epoch, "history": self.history})

    def load(self, path: Path, card: dict[str, Any]) -> None:
        """Continue where `save` left off; refuse the checkpoint of another run."""
        tensors, saved = load_tensors(path)
        before, now = options(saved), options(card)
        for option in before | now:
            if before.get(option) != now.get(option):
                raise ValueError(
                    f"checkpoint {path} was written with {option} {before.get(option)}, this run has "
                    f"{now.get(option)}; give the same options to resume, or another --out to start afresh "
                    "(--continue-from goes on from its weights)"
                )
        source = Source(path, "checkpoint", "start afresh with --overwrite")
        source.fields(saved, {"epoch": int, "history": list[dict]})
        if not 0 <= saved["epoch"] == len(saved["history"]) <= self.recipe.epochs:
            source.altered(f"it is at epoch {saved['epoch']} and has seen {len(saved['history'])}")
        for name, tensor in tensors.items():
            source.finite(name, tensor)
        try:
            self.model.load_state_dict(_with_prefix(tensors, "model."))
            self.average.load_state_dict(_with_prefix(tensors, "average."))
            for number, optimizer in enumerate(self.optimizers):
                _load_optimizer(optimizer, _with_prefix(tensors, f"optimizer{number}."))
        except (RuntimeError, ValueError, KeyError, IndexError):
            source.altered("its tensors are not those of this run")
        self.epoch, self.history = saved["epoch"], saved["history"]


def options(card: dict[str, Any]) -> dict[str, Any]:
    """What must agree for a run to be resumed, by the names that a user gives."""
    flat = {key: card.get(key) for key in IDENTITY if key != "recipe"}
    recipe = card.get("recipe")
    for name, value in recipe.items() if isinstance(recipe, dict) else []:
        option = {"learn_scale": "fixed-scale", "area": "min-area"}.get(name, name.replace("_", "-"))
        if name == "stages" and matches(value, list[dict]):
            flat["--epochs"] = sum(stage.get("epochs", 0) for stage in value)
        shown = not value if name == "learn_scale" else value[0] if name == "area" and value else value
        flat[f"--{option}"] = shown
    return flat


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The state of an optimiser by `index.name`: a number, or a tensor of the shape of its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, field = name.split(".", 1)
        if value.ndim and value.shape != parameters[int(index)].shape:
            raise ValueError(name)
        state.setdefault(int(index), {})[field] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def make_optimizers(model: Classifier, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """As the recipe says; weight decay for filters and class weights, not for scales and shifts."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    filters = [p for p in model.backbone.parameters() if recipe.optimizer == "muon" and fits_muon(p)]
    turned = set(map(id, filters))
    rest = [p for p in parameters if id(p) not in turned]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return [torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9, nesterov=True)]
    adamw = torch.optim.AdamW(groups, lr=recipe.lr, foreach=True)
    return [adamw, Muon(filters, recipe.filter_lr)] if filters else [adamw]


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
        if recipe.neighbours:
            loss = loss + recipe.neighbours * neighbour_loss(maps.flatten(1), targets)
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
    run = Training(backbone, classes, recipe, device or torch.device("cpu"))
    if class_weights is not None:
        head = run.model.head
        if class_weights.shape != head.weight.shape:
            raise ValueError(
                f"the class weights to start from are {list(class_weights.shape)}, this data set needs "
                f"{list(head.weight.shape)}; start from the weights file of the backbone, not its checkpoint"
            )
        head.weight.data.copy_(class_weights)
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
