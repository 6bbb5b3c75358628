"""Files to pictures and arrays: data sets, their class splits, and a cache of decoded pictures."""

from .folders import Found, read_query, read_support
from .pixels import load_pixels, load_usable
from .splits import (
    CLASSES,
    SPLITS,
    Split,
    data_root,
    open_split,
    read_cub,
    read_folder,
    read_mini_imagenet,
    spread_per_class,
)
from .store import Store

__all__ = [
    "CLASSES",
    "SPLITS",
    "Found",
    "Split",
    "Store",
    "data_root",
    "load_pixels",
    "load_usable",
    "open_split",
    "read_cub",
    "read_folder",
    "read_mini_imagenet",
    "read_query",
    "read_support",
    "spread_per_class",
]
