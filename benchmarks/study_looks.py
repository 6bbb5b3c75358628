"""What further looks at a picture do for its features: mirror image and corners, on val classes alone.

    python benchmarks/study_looks.py
    python benchmarks/study_looks.py --backbone runs/mine.safetensors --dataset cub --per-class 20

Prints 5-way accuracy of the nearest class mean by cosine at one and five shots, paired with the features of
the whole picture alone, and the time of a picture in multiples of one look.
"""

from __future__ import annotations

import argparse
import time

import torch

from fewshot_dpkl import CentroidHead, EpisodeSampler, FeatureSet, HeadResult, evaluate, paired_difference
from fewshot_dpkl.backbones import extract_features, load_backbone
from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.data import load_pixels, open_split, spread_per_class

SHIPPED = [("conv4-mini-imagenet", "mini-imagenet"), ("conv4-cub", "cub")]
LOOKS: dict[str, tuple[bool, float | tuple[float, ...] | None]] = {  # mirror, corners
    "the whole": (False, None),
    "and its mirror image": (True, None),
    "corners of 0.9, all mirrored": (True, 0.9),
    "corners of 0.875, all mirrored": (True, 0.875),
    "corners of 0.8, all mirrored": (True, 0.8),
    "corners of 0.7, all mirrored": (True, 0.7),
    "corners of 0.9 and 0.8, all mirrored": (True, (0.9, 0.8)),
    "corners of 0.9 and 0.7, all mirrored": (True, (0.9, 0.7)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", help="name or file (default: the shipped ones, each on its own set)")
    parser.add_argument("--dataset", help="mini-imagenet, cub or folder:PATH (with val/)")
    parser.add_argument("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    parser.add_argument("--per-class", type=int, default=40, help="pictures of each (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=600)
    arguments = parser.parse_args()
    if bool(arguments.backbone) != bool(arguments.dataset):
        raise ValueError("--backbone and --dataset go together; give both or neither")
    pairs = [(arguments.backbone, arguments.dataset)] if arguments.backbone else SHIPPED
    print("| val classes of | looks | 1 shot | 5 shots | time |\n| --- | --- | --- | --- | --- |")
    for name, dataset in pairs:
        backbone, split = load_backbone(name), open_split(dataset, "val", arguments.data_root)
        chosen = spread_per_class(split.labels, arguments.per_class)
        pixels, labels = load_pixels(split, backbone.resize)[chosen], split.labels[chosen]
        baseline: dict[int, HeadResult] = {}
        seconds = 0.0
        for look, (mirror, corners) in LOOKS.items():
            looking = backbone.like(mirror=mirror, corners=corners)
            started = time.perf_counter()
            rows = extract_features(looking, pixels)
            taken = time.perf_counter() - started
            seconds = seconds or taken
            cells = []
            for shot in (1, 5):
                features = FeatureSet.from_arrays(rows, labels)
                sampler = EpisodeSampler(features, shot=shot, query=15, seed=1)
                result = evaluate({look: CentroidHead()}, features, sampler, arguments.episodes)[look]
                difference, interval = paired_difference(result, baseline.setdefault(shot, result))
                gain = f" ({100 * difference:+.2f} ± {100 * interval:.2f})" if difference else ""
                cells.append(f"{100 * result.accuracy.mean():.2f}{gain}")
            print(f"| {dataset} | {look} | {' | '.join(cells)} | {taken / seconds:.1f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
