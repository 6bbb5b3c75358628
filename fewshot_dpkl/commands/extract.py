"""Turn pictures into a features file with a frozen backbone.

fewshot-dpkl extract --backbone conv4-cub --dataset cub --split novel --out F.npz
fewshot-dpkl extract --backbone torchvision:resnet18 --images DIR --out F.npz
"""

from __future__ import annotations

import argparse
from typing import Any

from fewshot_dpkl.backbones import Extractor, extract_features, load_backbone
from fewshot_dpkl.commands.cli import add_device_arguments, command_parser, say_passed_over, use_device
from fewshot_dpkl.data import load_usable, open_split, spread_per_class
from fewshot_dpkl.evaluation.features import FeatureSet


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add(
        "--backbone",
        default="conv4-mini-imagenet",
        help="name or file of a trained backbone, torchvision:NAME or timm:NAME (default: %(default)s)",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="mini-imagenet, cub or folder:PATH (with base/, val/ and novel/)")
    source.add_argument("--images", help="a folder or zip file with one folder of pictures per class")
    add("--split", default="novel", help="base, val or novel (default: %(default)s)")
    add("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    add("--out", required=True, help="features file, .npz or .safetensors")
    add("--per-class", type=int, help="only so many pictures of every class, evenly spread")
    add("--size", type=int, help="side of the pictures in pixels (default: the backbone's)")
    add(
        "--corners",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="look at the four corners of a picture too, each with this share of its side: 0.8 gives a "
        "Conv-4 better features for five times the time, 0.9 0.7 for nine times, 0 the whole alone (default: "
        "the backbone's card)",
    )
    add("--dtype", default="float32", choices=["float16", "float32"])
    add("--batch-size", type=int, default=16)
    add_device_arguments(parser)
    return parser.parse_args()


def looking(backbone: Extractor, size: int | None, corners: list[float] | None) -> Extractor:
    """The same backbone with other looks."""
    changes: dict[str, Any] = {} if corners is None else {"corners": [share for share in corners if share]}
    if size is not None:
        if size < 16:
            raise ValueError(f"--size is {size}; expected at least 16")
        changes |= {"resize": size, "crop": size, "side": size}
    return backbone.like(**changes) if changes else backbone


def main() -> None:
    arguments = parse()
    if arguments.per_class is not None and arguments.per_class < 1:
        raise ValueError(f"--per-class is {arguments.per_class}; expected at least 1")
    if not arguments.out.endswith((".npz", ".safetensors")):
        raise ValueError(f"--out is {arguments.out}; expected a name that ends in .npz or .safetensors")
    device = use_device(arguments)
    backbone = looking(load_backbone(arguments.backbone), arguments.size, arguments.corners)
    if arguments.images:
        split = open_split(f"folder:{arguments.images}", "all")
    else:
        split = open_split(arguments.dataset, arguments.split, arguments.data_root)
    pixels, split, refused = load_usable(split, backbone.resize)
    say_passed_over(refused.items())
    labels = split.labels
    if arguments.per_class:
        chosen = spread_per_class(labels, arguments.per_class)
        pixels, labels = pixels[chosen], labels[chosen]
    features = extract_features(backbone, pixels, arguments.batch_size, device).astype(arguments.dtype)
    card = {"backbone": backbone.card, "dataset": split.dataset, "split": split.split, "images": len(labels)}
    card |= {"passed_over": len(refused)} if refused else {}
    FeatureSet(features, labels, split.class_names, card).save(arguments.out)
    count, size = features.shape
    print(
        f"wrote {arguments.out}: {count} pictures of {len(split.class_names)} classes, {size} features each"
    )
