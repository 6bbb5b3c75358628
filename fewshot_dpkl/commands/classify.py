"""Classify pictures of your own from a few examples per class.

    python scripts/classify.py --support birds/ --query new/ --head dpkl --head nn
    python scripts/classify.py --support birds/ --backbone torchvision:resnet18 --save birds.safetensors
    python scripts/classify.py --model birds.safetensors --query photo.jpg --threshold 0.5 --out answers.csv

The support folder holds one folder of pictures per class: birds/<class>/*.jpg. Where the query folder has
folders named after classes, accuracy is printed too. A picture that cannot be read is named and passed over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fewshot_dpkl import HEADS, Backbone, FewShotClassifier, find_backbone
from fewshot_dpkl.commands.cli import add_device_arguments, use_device
from fewshot_dpkl.data import read_query, read_support
from fewshot_dpkl.files import user_cache
from fewshot_dpkl.pictures.answers import NOT_SURE, Answers, shown, table, write
from fewshot_dpkl.pictures.embedding import embed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--support", type=Path, metavar="DIR", help="folder with a folder of pictures per class"
    )
    source.add_argument("--model", type=Path, metavar="FILE", help="a classifier written by --save")
    parser.add_argument(
        "--query", type=Path, nargs="+", metavar="DIR|FILE", default=[], help="pictures to classify"
    )
    parser.add_argument(
        "--backbone",
        help="shipped name, torchvision:NAME, timm:NAME or file (default: conv4-mini-imagenet, the model's)",
    )
    parser.add_argument(
        "--head",
        action="append",
        metavar="NAME",
        help=f"one of: {', '.join(HEADS)}; can be repeated (default: dpkl)",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the fitted classifier (.safetensors)")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.0,
        help=f"say '{NOT_SURE}' where the top probability is lower (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all probabilities, .csv or .json")
    parser.add_argument("--no-cache", action="store_true", help="neither use nor keep features of pictures")
    add_device_arguments(parser)
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    if arguments.model and (arguments.head or arguments.save):
        raise ValueError("--model comes with its head and is already saved; leave out --head and --save")
    if arguments.save and len(set(arguments.head or ["dpkl"])) > 1:
        raise ValueError("--save keeps one head; give one --head, or save each in a run of its own")
    if arguments.save and arguments.save.suffix != ".safetensors":
        raise ValueError(f"--save is {arguments.save}; expected a name that ends in .safetensors")
    if not arguments.query and not arguments.save:
        raise ValueError("there is nothing to do; give pictures with --query or a file with --save")
    if not 0 <= arguments.threshold <= 1:
        raise ValueError(f"--threshold is {arguments.threshold}; expected a probability from 0 to 1")
    if arguments.out and arguments.out.suffix not in (".csv", ".json"):
        raise ValueError(f"--out is {arguments.out}; expected a name that ends in .csv or .json")


def main() -> None:
    arguments = parse()
    check(arguments)
    device = use_device(arguments)
    cache = None if arguments.no_cache else user_cache() / "features"
    query, folders = read_query(arguments.query) if arguments.query else ([], [])
    if arguments.model:
        loaded = FewShotClassifier.load(arguments.model, arguments.backbone)
        backbone, classifiers = on_device(loaded.backbone_, device), {loaded.head_.name: loaded}
    else:
        heads = list(dict.fromkeys(arguments.head or ["dpkl"]))
        backbone = on_device(find_backbone(arguments.backbone or "conv4-mini-imagenet"), device)
        classifiers = fit(backbone, heads, arguments.support, cache)
    if arguments.save:
        next(iter(classifiers.values())).save(arguments.save)
        print(f"wrote {arguments.save}")
    if query:
        answers = answer(backbone, classifiers, query, folders, arguments.threshold, cache)
        print(table(answers))
        if arguments.out:
            write(arguments.out, answers)


def on_device(backbone: Backbone, device: Any) -> Backbone:
    return backbone.to(device) if isinstance(backbone, nn.Module) else backbone


def fit(
    backbone: Backbone, heads: Sequence[str], folder: Path, cache: Path | None
) -> dict[str, FewShotClassifier]:
    """A classifier of each head, all on the same features; pictures that cannot be read are left out."""
    classifiers = {head: FewShotClassifier(backbone, head, cache) for head in heads}
    paths, labels = read_support(folder)
    features, refused = embed(backbone, paths, cache, progress=True)
    warn(paths, refused)
    kept = [label for index, label in enumerate(labels) if index not in refused]
    empty = sorted(set(labels) - set(kept))
    if empty:
        raise ValueError(f"class {shown(empty[0])} has no picture that can be read; give it at least one")
    for classifier in classifiers.values():
        classifier.fit_features(features, kept)
    return classifiers


def answer(
    backbone: Backbone,
    classifiers: dict[str, FewShotClassifier],
    paths: list[Path],
    folders: list[str | None],
    threshold: float,
    cache: Path | None,
) -> Answers:
    features, refused = embed(backbone, paths, cache, progress=True)
    warn(paths, refused)
    classes = [str(name) for name in next(iter(classifiers.values())).classes_]
    truth = [folder if folder in classes else None for folder in folders]
    answers = Answers([shown(path) for path in paths], truth, refused, classes, threshold)
    read = [index for index in range(len(paths)) if index not in refused]
    for head, classifier in classifiers.items():
        answers.probabilities[head] = np.full((len(paths), len(classes)), np.nan)
        if read:
            answers.probabilities[head][read] = classifier.head_.predict_proba(features)
    return answers


def warn(paths: Sequence[Path], refused: dict[int, str]) -> None:
    for index, reason in refused.items():
        print(f"passed over {shown(paths[index])}: {reason}", file=sys.stderr)
