"""Classify pictures of your own from a few examples per class.

    fewshot-dpkl classify --support birds/ --query new/ --head dpkl-calibrated --head nn
    fewshot-dpkl classify --support birds/ --backbone torchvision:resnet18 --save birds.safetensors
    fewshot-dpkl classify --support birds/ --query new/ --unlabeled more/ --transductive --suggest 5
    fewshot-dpkl classify --model birds.safetensors --query photo.jpg --unknown 0.05 --out answers.csv

The support folder holds one folder of pictures per class: birds/<class>/*.jpg. Where the query folder has
folders named after classes, accuracy is printed too. A file that cannot be read is named and passed over; a
class without a picture is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fewshot_dpkl import HEADS, Backbone, FewShotClassifier, find_backbone, make_head
from fewshot_dpkl.commands.cli import add_device_arguments, command_parser, hint, say_passed_over, use_device
from fewshot_dpkl.data import Found, read_query, read_support
from fewshot_dpkl.files import user_cache
from fewshot_dpkl.heads import DEFAULT_HEAD
from fewshot_dpkl.heads.suggest import suggest
from fewshot_dpkl.pictures.answers import NONE_OF_THESE, NOT_SURE, Answers, hints, shown, table, write
from fewshot_dpkl.pictures.classifier import check_share, unfamiliarity
from fewshot_dpkl.pictures.embedding import embed

DEFAULT_BACKBONE = "conv4-mini-imagenet"
WEAK = (
    f"{DEFAULT_BACKBONE} is small and has seen 64 classes at 84 pixels; for pictures of your own try "
    "--backbone timm:vit_small_patch14_dinov2.lvd142m or torchvision:resnet18"
)


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--support", type=Path, metavar="DIR", help="folder with a folder of pictures per class"
    )
    source.add_argument("--model", type=Path, metavar="FILE", help="a classifier written by --save")
    add("--query", type=Path, nargs="+", metavar="DIR|FILE", default=[], help="pictures to classify")
    add(
        "--backbone",
        help=f"shipped name, torchvision:NAME, timm:NAME or file (default: {DEFAULT_BACKBONE}, the model's)",
    )
    add(
        "--head",
        action="append",
        metavar="NAME",
        help=f"one of: {', '.join(HEADS)}; can be repeated; or all, without bnn (default: {DEFAULT_HEAD})",
    )
    add(
        "--unlabeled",
        type=Path,
        nargs="+",
        metavar="DIR|FILE",
        default=[],
        help="pictures of these classes without labels, to learn from too",
    )
    add("--transductive", action="store_true", help="learn from the pictures to classify, too")
    add(
        "--suggest",
        type=int,
        metavar="N",
        help="also name the N pictures of --query whose labels would teach the most",
    )
    add("--save", type=Path, metavar="FILE", help="keep the fitted classifier (.safetensors)")
    add(
        "--threshold",
        type=float,
        default=0.0,
        help=f"say '{NOT_SURE}' where the top probability is lower (default: %(default)s)",
    )
    add(
        "--unknown",
        type=float,
        metavar="SHARE",
        help=f"say '{NONE_OF_THESE}' outside all but this share of known pictures, such as 0.05",
    )
    add("--out", type=Path, metavar="FILE", help="write all probabilities, .csv or .json")
    add("--no-cache", action="store_true", help="neither use nor keep features of pictures")
    add_device_arguments(parser)
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    if arguments.model and (arguments.head or arguments.save):
        raise ValueError("--model comes with its head and is already saved; leave out --head and --save")
    if arguments.save and len(heads_of(arguments)) > 1:
        raise ValueError("--save keeps one head; give one --head, or save each in a run of its own")
    if arguments.save and arguments.save.suffix != ".safetensors":
        raise ValueError(f"--save is {arguments.save}; expected a name that ends in .safetensors")
    if arguments.model and (arguments.unlabeled or arguments.transductive):
        raise ValueError("--model has learnt already; fit again with --support to learn from more pictures")
    if arguments.model and arguments.suggest is not None:
        raise ValueError("--model does not hold the labelled pictures; give --support to --suggest others")
    if not arguments.query and (arguments.transductive or arguments.suggest is not None):
        raise ValueError("--transductive and --suggest are about the pictures to classify; give --query")
    if arguments.suggest is not None and arguments.suggest < 1:
        raise ValueError(f"--suggest is {arguments.suggest}; give a number of pictures from 1 on")
    if not arguments.query and not arguments.save:
        raise ValueError("there is nothing to do; give pictures with --query or a file with --save")
    check_share("--threshold", arguments.threshold)
    check_share("--unknown", arguments.unknown)
    if arguments.out and arguments.out.suffix not in (".csv", ".json"):
        raise ValueError(f"--out is {arguments.out}; expected a name that ends in .csv or .json")


def heads_of(arguments: argparse.Namespace) -> list[str]:
    names = list(dict.fromkeys(arguments.head or [DEFAULT_HEAD]))
    return [name for name in HEADS if name != "bnn"] if "all" in names else names


def main() -> None:
    arguments = parse()
    check(arguments)
    device = use_device(arguments)
    cache = None if arguments.no_cache else user_cache() / "features"
    query = read_query(arguments.query) if arguments.query else None
    if arguments.model:
        loaded = FewShotClassifier.load(arguments.model, arguments.backbone)
        backbone, classifiers = on_device(loaded.backbone_, device), {loaded.head_.name: loaded}
    else:
        backbone = on_device(find_backbone(arguments.backbone or DEFAULT_BACKBONE), device)
        paths = arguments.unlabeled + arguments.query * arguments.transductive
        unlabeled = read_unlabeled(backbone, paths, cache) if paths else None
        classifiers = fit(backbone, heads_of(arguments), arguments.support, cache, unlabeled)
    if arguments.save:
        next(iter(classifiers.values())).save(arguments.save)
        print(f"wrote {arguments.save}")
    if query:
        answers = answer(backbone, classifiers, query, arguments, cache)
        if arguments.out:
            write(arguments.out, answers)
        print(table(answers))
        if arguments.suggest is not None:
            print(suggestions(next(iter(classifiers.values())), query, arguments.suggest, backbone, cache))
        for sentence in hints(answers):
            hint(sentence)
    if backbone.name == DEFAULT_BACKBONE:
        hint(WEAK)


def on_device(backbone: Backbone, device: Any) -> Backbone:
    return backbone.to(device) if isinstance(backbone, nn.Module) else backbone


def read_unlabeled(backbone: Backbone, paths: Sequence[Path], cache: Path | None) -> np.ndarray:
    """Features of pictures without labels; what cannot be read is left out by name."""
    found = read_query(paths)
    features, refused = embed(backbone, found.paths, cache, progress=True)
    name_left_out(found, refused)
    return features


def suggestions(
    classifier: FewShotClassifier, query: Found, count: int, backbone: Backbone, cache: Path | None
) -> str:
    """The pictures to label next, one a line."""
    features, refused = embed(backbone, query.paths, cache)
    read = [path for index, path in enumerate(query.paths) if index not in refused]
    best = suggest(features, classifier.labeled_, min(count, len(read)))
    return "\n".join(["", "label these next:", *(f"  {shown(read[index])}" for index in best)])


def fit(
    backbone: Backbone,
    heads: Sequence[str],
    folder: Path,
    cache: Path | None,
    unlabeled: np.ndarray | None = None,
) -> dict[str, FewShotClassifier]:
    """A classifier of each head, all on the same features; what cannot be read is left out by name.

    Heads that learn from pictures without labels are given the features of such.
    """
    made = {name: make_head(name) for name in heads}
    classifiers = {name: FewShotClassifier(backbone, head, cache) for name, head in made.items()}
    found = read_support(folder)
    features, refused = embed(backbone, found.paths, cache, progress=True)
    name_left_out(found, refused)
    kept = [label for index, label in enumerate(found.labels) if index not in refused]
    empty = [shown(name) for name in found.classes if name not in kept]
    if empty:
        raise ValueError(
            f"class {', '.join(empty)} has no picture that can be read; give it at least one, or remove "
            "its folder"
        )
    for name, classifier in classifiers.items():
        classifier.fit_features(features, kept, unlabeled if made[name].learns_from_unlabeled else None)
    return classifiers


def answer(
    backbone: Backbone,
    classifiers: dict[str, FewShotClassifier],
    query: Found,
    arguments: argparse.Namespace,
    cache: Path | None,
) -> Answers:
    features, refused = embed(backbone, query.paths, cache, progress=True)
    name_left_out(query, refused)
    if not len(features):
        raise ValueError(f"none of the {len(query.paths)} files to classify is a picture that can be read")
    classes = [str(name) for name in next(iter(classifiers.values())).classes_]
    truth = [folder if folder in classes else None for folder in query.folders]
    names = [shown(path) for path in query.paths]
    answers = Answers(names, truth, refused, classes, arguments.threshold, arguments.unknown)
    for head, classifier in classifiers.items():
        answers.probabilities[head] = np.full((len(names), len(classes)), np.nan)
        answers.probabilities[head][answers.answered()] = classifier.head_.predict_proba(features)
        if arguments.unknown is not None:
            answers.unfamiliarity[head] = np.full(len(names), np.nan)
            answers.unfamiliarity[head][answers.answered()] = unfamiliarity(classifier.head_, features)
    return answers


def name_left_out(found: Found, refused: dict[int, str]) -> None:
    reasons = [*found.left_out, *((found.paths[index], reason) for index, reason in refused.items())]
    say_passed_over((shown(path), reason) for path, reason in reasons)
