"""The state of a training run: what is saved after every epoch, and read to go on."""

from __future__ import annotations

import copy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_dpkl.schema import Source, matches

from .files import load_tensors, save_tensors
from .head import CosineClassifier
from .muon import Muon, fits_muon
from .recipe import Recipe

IDENTITY = ("backbone", "start", "dataset", "classes", "images", "recipe", "processes")
"""The entries of a card that must agree for a run to be resumed."""


class Classifier(nn.Module):
    """Backbone and head as one module, so that data-parallel training sees one forward pass."""

    def __init__(self, backbone: nn.Module, head: CosineClassifier, precision: str = "float32") -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.precision = precision

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, 3, H, W]` to scores `[B, C]` and feature maps `[B, channels, h, w]`."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            feature_map = self.backbone.feature_map(images).float()  # type: ignore[operator]
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
        self.model = (
            Classifier(backbone, head, recipe.precision).to(device).to(memory_format=torch.channels_last)
        )
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
    defaults = {field.name: field.default for field in fields(Recipe) if field.default is not MISSING}
    for name, value in ({**defaults, **recipe} if isinstance(recipe, dict) else {}).items():
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
