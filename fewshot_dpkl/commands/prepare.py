"""Check a download of a data set, say what is missing, and decode its pictures once.

fewshot-dpkl prepare --dataset mini-imagenet --source ~/Downloads/mini-imagenet
fewshot-dpkl prepare --dataset cub              (looks in the data root)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fewshot_dpkl.commands.cli import command_parser
from fewshot_dpkl.data import (
    CLASSES,
    SPLITS,
    Store,
    data_root,
    load_pixels,
    open_split,
    read_cub,
    read_mini_imagenet,
)


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--dataset", required=True, choices=sorted(CLASSES))
    parser.add_argument(
        "--source", type=Path, help="folder or zip file of the download (default: in the data root)"
    )
    parser.add_argument(
        "--data-root", type=Path, help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)"
    )
    parser.add_argument("--check-only", action="store_true", help="do not decode the pictures")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.source:
        store = Store(arguments.source)
        read = read_mini_imagenet if arguments.dataset == "mini-imagenet" else read_cub
        splits = [read(store, name) for name in SPLITS]
    else:
        splits = [open_split(arguments.dataset, name, arguments.data_root) for name in SPLITS]
    for split in splits:
        if not arguments.check_only:
            load_pixels(split, 84)
        print(f"{split.dataset} {split.split}: {len(split.class_names)} classes, {len(split)} pictures")
    place = data_root(arguments.data_root) / arguments.dataset
    if arguments.source and not place.exists():
        print(f"all is there; move or link it to {place}, where the other commands look for it")
