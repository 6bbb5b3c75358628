"""Check a download of a data set, say what is missing, and decode its pictures once.

fewshot-dpkl prepare --dataset mini-imagenet --source ~/Downloads/mini-imagenet
fewshot-dpkl prepare --dataset cub              (looks in the data root)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fewshot_dpkl.commands.cli import command_parser, say_passed_over
from fewshot_dpkl.data import (
    CLASSES,
    SPLITS,
    Split,
    Store,
    data_root,
    load_usable,
    open_split,
    read_cub,
    read_mini_imagenet,
)


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--dataset", required=True, help="mini-imagenet, cub or folder:PATH")
    add("--source", type=Path, help="folder or zip file of the download (default: in the data root)")
    add("--data-root", type=Path, help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    add("--check-only", action="store_true", help="do not decode the pictures")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    is_folder = arguments.dataset.startswith("folder:")
    if arguments.dataset not in CLASSES and not is_folder:
        raise ValueError(f"unknown data set {arguments.dataset!r}; choose mini-imagenet, cub or folder:PATH")
    if arguments.source and is_folder:
        raise ValueError("folder:PATH says where the pictures are; leave out --source")
    if is_folder:
        splits = folder_splits(arguments.dataset)
    elif arguments.source:
        store = Store(arguments.source)
        read = read_mini_imagenet if arguments.dataset == "mini-imagenet" else read_cub
        splits = [read(store, name) for name in SPLITS]
    else:
        splits = [open_split(arguments.dataset, name, arguments.data_root) for name in SPLITS]
    for split in splits:
        if not arguments.check_only:
            _, split, refused = load_usable(split, 84)
            say_passed_over(refused.items())
        print(f"{split.dataset} {split.split}: {len(split.class_names)} classes, {len(split)} pictures")
    if is_folder:
        return
    place = data_root(arguments.data_root) / arguments.dataset
    if arguments.source and not place.exists():
        print(f"all is there; move or link it to {place}, where the other commands look for it")


def folder_splits(dataset: str) -> list[Split]:
    """The splits base/, val/ and novel/ of a folder, or all of it where it has none of them."""
    found = []
    for name in SPLITS:
        try:
            found.append(open_split(dataset, name))
        except FileNotFoundError:  # of a folder that is not there, by the line below
            continue
    return found or [open_split(dataset, "all")]
