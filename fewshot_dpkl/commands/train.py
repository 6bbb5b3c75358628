"""Train a backbone on the base classes of a data set and write its weights with a card.

fewshot-dpkl train --dataset mini-imagenet --epochs 20 --out conv4.safetensors
torchrun --nproc-per-node=2 -m fewshot_dpkl train --dataset cub --epochs 80 --out cub.safetensors
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fewshot_dpkl.backbones import load_backbone
from fewshot_dpkl.backbones.files import load_tensors
from fewshot_dpkl.backbones.models import ARCHITECTURES, build, centre_crop
from fewshot_dpkl.backbones.recipe import OPTIMIZERS, PRECISIONS, Recipe, Stage
from fewshot_dpkl.backbones.train import class_means, train
from fewshot_dpkl.commands.cli import (
    add_device_arguments,
    command_line,
    command_parser,
    say_passed_over,
    use_device,
)
from fewshot_dpkl.commands.validation import make_validate
from fewshot_dpkl.data import load_usable, open_split

OPTIONS = {  # of the recipe, by the name of its field
    "optimizer": "muon turns the filters by Muon, at --filter-lr, and all else by AdamW",
    "lr": "peak of the one-cycle schedule",
    "filter_lr": "of Muon",
    "weight_decay": "of filters and class weights",
    "warmup": "share of the run in which the rate rises",
    "label_smoothing": "of the cross-entropy",
    "scale": "of the cosine classifier",
    "prototypes": "weight of a loss that asks for the nearest class mean of the batch, as an episode does",
    "jitter": "strength of the colour jitter",
    "average": "decay of the averaged weights",
    "precision": "of the products in convolutions; bfloat16 takes 0.6 of the time where a processor has it",
    "seed": "everything follows from it",
}


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--dataset", required=True, help="mini-imagenet, cub or folder:PATH (with base/ and val/)")
    add("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    add("--backbone", default="conv4", choices=sorted(ARCHITECTURES))
    add("--method", default="baseline++", choices=["baseline++"])
    add("--epochs", type=int, required=True)
    add("--out", type=Path, required=True, help="weights of the best epoch, .safetensors")
    add(
        "--continue-from",
        dest="start",
        help="backbone to go on from; class weights start as in its checkpoint, or at the class means",
    )
    add("--resume", action="store_true", help="continue from the checkpoint beside --out")
    add("--overwrite", action="store_true", help="train anew where --out exists")
    add(
        "--stages",
        default="48:16:0.3,64:16:0.3,84:16:0.4",
        help="picture size : batch size : share of the epochs, and perhaps : how many of the first blocks "
        "learn no more, from first stage to last (default: %(default)s)",
    )
    for name, about in OPTIONS.items():
        default = getattr(Recipe, name)
        choices = {"optimizer": OPTIMIZERS, "precision": PRECISIONS}.get(name)
        about += f" (default: {default})"
        add(f"--{name.replace('_', '-')}", type=type(default), default=default, choices=choices, help=about)
    add("--fixed-scale", action="store_true", help="do not learn the scale")
    add("--min-area", type=float, default=Recipe.area[0], help="smallest random crop, share of the picture")
    add("--val-per-class", type=int, default=60, help="val pictures per class after each epoch")
    add_device_arguments(parser)
    return parser.parse_args()


def stages_of(text: str, epochs: int) -> tuple[Stage, ...]:
    """`48:16:0.2,64:16:0.8:1` and 10 epochs: 2 epochs of 48-pixel pictures, 8 of 64 with one block frozen."""
    try:
        rows = [part.split(":") for part in text.split(",")]
        ends = np.cumsum([0.0, *(float(share) for _, _, share, *_ in rows)])
        lengths = np.diff(np.round(epochs * ends / ends[-1]))
        return tuple(
            Stage(int(length), int(size), int(batch), *map(int, frozen))
            for length, (size, batch, _, *frozen) in zip(lengths, rows, strict=True)
        )
    except (ValueError, TypeError):
        raise ValueError(
            f"--stages is {text!r}; expected SIZE:BATCH:SHARE,… like 48:16:0.2,64:16:0.8"
        ) from None


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    return Recipe(
        stages=stages_of(arguments.stages, arguments.epochs),
        learn_scale=not arguments.fixed_scale,
        area=(arguments.min_area, 1.0),
        **{name: getattr(arguments, name) for name in OPTIONS},
    )


def starting_point(arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, Any] | None, Tensor | None]:
    """A new backbone, or that to go on from, with its history and the class weights of a checkpoint."""
    backbone = build(arguments.backbone, seed=arguments.seed)
    if arguments.start is None:
        return backbone, None, None
    started = load_backbone(arguments.start)
    weights = started.module.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in backbone.state_dict().items()}:
        raise ValueError(
            f"--continue-from {arguments.start} is a {started.card['backbone']}, this run trains a "
            f"{arguments.backbone}; name a file of that kind, or give --backbone {started.card['backbone']}"
        )
    backbone.load_state_dict(weights)
    kept = ("backbone", "dataset", "command", "recipe", "epoch", "kept", "start")
    history = {"name": arguments.start, **{key: started.card[key] for key in kept if key in started.card}}
    path = Path(arguments.start)
    class_weights = load_tensors(path)[0].get("model.head.weight") if path.is_file() else None
    return backbone, history, class_weights


def check(arguments: argparse.Namespace) -> None:
    if arguments.epochs < 1:
        raise ValueError(f"--epochs is {arguments.epochs}; expected at least 1")
    if arguments.out.suffix != ".safetensors":
        raise ValueError(f"--out is {arguments.out}; expected a name that ends in .safetensors")
    if arguments.resume and arguments.overwrite:
        raise ValueError("--resume continues a run and --overwrite begins one; give one of them")
    for path in (arguments.out, arguments.out.with_suffix(".checkpoint.safetensors")):
        if path.exists() and not (arguments.resume or arguments.overwrite):
            raise ValueError(
                f"{path} exists; --resume continues that run, --overwrite trains anew, or name another --out"
            )


def main() -> None:
    arguments = parse()
    check(arguments)
    recipe = recipe_of(arguments)
    device = use_device(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # started by torchrun
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    resize = crop = 84
    base = open_split(arguments.dataset, "base", arguments.data_root)
    val = open_split(arguments.dataset, "val", arguments.data_root)
    shared = sorted(set(base.class_names) & set(val.class_names))
    if shared:
        raise ValueError(f"class {shared[0]} is in base and in val; keep the classes of the splits apart")
    val_pixels, val, val_refused = load_usable(val, resize)
    validate = make_validate(centre_crop(val_pixels, crop), val.labels, arguments.val_per_class)
    pixels, base, refused = load_usable(base, 84 if base.dataset == "mini-imagenet" else 96)
    say_passed_over([*refused.items(), *val_refused.items()])
    backbone, history, class_weights = starting_point(arguments)
    if history and class_weights is None:
        class_weights = class_means(backbone, centre_crop(pixels, crop), base.labels)
    card = {
        "backbone": arguments.backbone,
        "dataset": base.dataset,
        "split": "base",
        "method": arguments.method,
        "preprocessing": {"resize": resize, "crop": crop, "mirror": True},
        "seed": arguments.seed,
        "start": history,
        "command": command_line(int(os.environ.get("WORLD_SIZE", "1"))),
        "torch": torch.__version__,
    }
    card = train(
        backbone,
        pixels,
        base.labels,
        recipe,
        arguments.out,
        card,
        validate,
        resume=arguments.resume,
        device=device,
        class_weights=class_weights,
        log=lambda line: print(line, flush=True),
    )
    if card:
        print(f"wrote {arguments.out}: epoch {card['kept']['epoch']} of {recipe.epochs}")
    if dist.is_initialized():
        dist.destroy_process_group()
