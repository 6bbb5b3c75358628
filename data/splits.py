"""Class splits of mini-ImageNet, CUB-200-2011 and plain image folders: names and labels, no pixels."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fewshot_dpkl.files import user_cache

from .store import Store

SPLITS = ("base", "val", "novel")
ADVICE = {
    "mini-imagenet": (
        "get the 84×84 pictures and the split of Ravi & Larochelle: a folder images/ with 60,000 .jpg files "
        "(or zip files that hold it) beside train.csv, val.csv and test.csv, each with the columns "
        "filename,label; the csv files are at https://github.com/twitter-research/meta-learning-lstm/tree/master/data/"
        "miniImagenet, the pictures come from ImageNet (https://image-net.org/download, research use)"
    ),
    "cub": (
        "get CUB_200_2011.tgz (1.1 GB) from https://data.caltech.edu/records/65de6-vp158, unpack it with "
        "`tar xzf CUB_200_2011.tgz`, and keep the folder CUB_200_2011 with images/, images.txt, classes.txt"
    ),
}
CLASSES = {
    "mini-imagenet": {"base": 64, "val": 16, "novel": 20},
    "cub": {"base": 100, "val": 50, "novel": 50},
}


@dataclass(frozen=True)
class Split:
    """Pictures of some classes: picture i is `store.read(names[i])`, of class `class_names[labels[i]]`."""

    dataset: str
    split: str
    store: Store
    names: list[str]
    labels: np.ndarray  # int64 [N]
    class_names: list[str]

    def __len__(self) -> int:
        return len(self.names)


def data_root(given: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets are: `given`, else $FEWSHOT_DPKL_DATA, else a folder in the user's cache."""
    if given:
        return Path(given)
    if os.environ.get("FEWSHOT_DPKL_DATA"):
        return Path(os.environ["FEWSHOT_DPKL_DATA"])
    return user_cache() / "data"


def open_split(dataset: str, split: str, root: str | os.PathLike[str] | None = None) -> Split:
    """A split of `mini-imagenet`, `cub` (both under the data root) or `folder:PATH`."""
    if dataset.startswith("folder:"):
        return read_folder(dataset.removeprefix("folder:"), split)
    if dataset not in CLASSES:
        raise ValueError(f"unknown data set {dataset!r}; choose mini-imagenet, cub or folder:PATH")
    source = data_root(root) / dataset
    if not source.exists():
        raise FileNotFoundError(
            f"there is no {source}; {ADVICE[dataset]}; then set --data-root or $FEWSHOT_DPKL_DATA to the "
            f"folder that holds {dataset}/"
        )
    return read_mini_imagenet(source, split) if dataset == "mini-imagenet" else read_cub(source, split)


def read_mini_imagenet(source: str | os.PathLike[str] | Store, split: str) -> Split:
    """The usual layout: `images/*.jpg` and `train.csv`, `val.csv`, `test.csv` (64, 16 and 20 classes)."""
    _check_split_name(split)
    store = source if isinstance(source, Store) else Store(source)
    table = {"base": "train.csv", "val": "val.csv", "novel": "test.csv"}[split]
    folder = store.folder_of(table)
    if folder is None:
        raise FileNotFoundError(f"{store.source} has no {table}; {ADVICE['mini-imagenet']}")
    rows = [line.strip().split(",") for line in store.lines(folder + table)]
    if rows[0] != ["filename", "label"] or any(len(row) != 2 for row in rows):
        raise ValueError(
            f"{folder}{table} in {store.source} should have the columns filename,label in every line"
        )
    pairs = [(f"{folder}images/{file}", label) for file, label in rows[1:]]
    return _checked("mini-imagenet", split, store, pairs)


def read_cub(source: str | os.PathLike[str] | Store, split: str) -> Split:
    """The official layout, split as Chen et al. 2019: of the classes by folder name, base are the even
    ones (100), val those with i % 4 == 1 (50), novel those with i % 4 == 3 (50)."""
    _check_split_name(split)
    store = source if isinstance(source, Store) else Store(source)
    folder = store.folder_of("images.txt")
    if folder is None or folder + "classes.txt" not in store:
        raise FileNotFoundError(f"{store.source} has no images.txt and classes.txt; {ADVICE['cub']}")
    for table in ("classes.txt", "images.txt"):
        if any(len(line.split()) != 2 for line in store.lines(folder + table)):
            raise ValueError(
                f"{folder}{table} in {store.source} should have a number and a name in every line"
            )
    classes = sorted(line.split()[1] for line in store.lines(folder + "classes.txt"))
    if len(classes) != 200:
        raise ValueError(f"{folder}classes.txt in {store.source} names {len(classes)} classes, expected 200")
    rule = {"base": lambda i: i % 2 == 0, "val": lambda i: i % 4 == 1, "novel": lambda i: i % 4 == 3}[split]
    wanted = {name for index, name in enumerate(classes) if rule(index)}
    files = [line.split()[1] for line in store.lines(folder + "images.txt")]
    pairs = [(f"{folder}images/{file}", file.split("/")[0]) for file in files]
    return _checked("cub", split, store, [pair for pair in pairs if pair[1] in wanted])


def read_folder(source: str | os.PathLike[str] | Store, split: str = "all") -> Split:
    """Any `root/class/*.jpg` (folder or zip file); what is a picture, its content decides, see `load_usable`.

    With `split` other than `all`, the classes are those of the subfolder `root/<split>/class/*.jpg`.
    """
    store = source if isinstance(source, Store) else Store(source)
    inside = "" if split == "all" else split

    def is_asked_for(parts: list[str]) -> bool:
        hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
        return len(parts) >= 2 and inside in ("", *parts[:-2]) and not hidden

    pairs = [(name, parts[-2]) for name in sorted(store) if is_asked_for(parts := name.split("/"))]
    for folder in store.empty:
        if is_asked_for([*folder.split("/"), "nothing"]):
            raise ValueError(f"class {folder} in {store.source} has no picture; give it one, or remove it")
    if not pairs:
        where = "" if split == "all" else f"{split}/"
        raise FileNotFoundError(
            f"{store.source} has no pictures {where}CLASS/*.jpg; expected a folder of pictures per class"
        )
    return _checked(f"folder:{store.source.name}", split, store, pairs)


def _checked(dataset: str, split: str, store: Store, pairs: list[tuple[str, str]]) -> Split:
    """A Split of (file, class) pairs, after a look at whether all is there."""
    missing = [file for file, _ in pairs if file not in store]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(pairs)} pictures of {dataset} {split} are missing in {store.source}, "
            f"the first is {missing[0]}; {ADVICE.get(dataset, 'put them there')}"
        )
    class_names = sorted({label for _, label in pairs})
    expected = CLASSES.get(dataset, {}).get(split, len(class_names))
    if len(class_names) != expected:
        raise ValueError(
            f"{dataset} {split} in {store.source} has {len(class_names)} classes, expected {expected}; "
            f"{ADVICE[dataset]}"
        )
    repeated, times = Counter(file for file, _ in pairs).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{dataset} {split} in {store.source} lists {repeated} {times} times, expected once")
    number = {name: index for index, name in enumerate(class_names)}
    labels = np.array([number[label] for _, label in pairs], dtype=np.int64)
    return Split(dataset, split, store, [file for file, _ in pairs], labels, class_names)


def spread_per_class(labels: np.ndarray, number: int) -> np.ndarray:
    """Rows of at most `number` examples of every class, spread evenly over the class's order.

    The first pictures of a class are often alike (one photographer, one upload), and few-shot accuracy on
    them alone comes out points too high.
    """
    chosen = []
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        chosen.append(rows[np.linspace(0, len(rows) - 1, min(number, len(rows))).round().astype(int)])
    return np.concatenate(chosen)


def _check_split_name(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose base, val or novel")
