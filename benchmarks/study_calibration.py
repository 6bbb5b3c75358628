"""All heads on six kinds of features: is there one to trust on features that nobody tuned it on?

    python benchmarks/study_calibration.py --mini mini-val.npz --cub cub-val.npz --root FOLDER --episodes 600

FOLDER holds the files of FILES below, with arrays X and y; the other two are features of validation classes
(`fewshot-dpkl extract --split val`). A cell that is in --out is not run again. Prints, for every setting,
accuracy, NLL and ECE by head and set, how well unseen classes are told, and where the default head fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from fewshot_dpkl import EpisodeSampler, FeatureSet, HeadResult, evaluate, make_head, paired_difference
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads import DEFAULT_HEAD

HEADS = ("nn", "centroid", "cosine", "logreg", "blr", "dblr", "dpkl", DEFAULT_HEAD)
FILES = {
    "fruits": "fruits-efficientnet-lite0.npz",
    "digits": "digits-efficientnet-lite0.npz",
    "tiny": "tiny-imagenet-efficientnet-lite0.npz",
    "banking": "banking77-minilm.npz",
}
LOWEST_NLL, ECE = 0.005, {1: 0.05, 5: 0.03}  # what is allowed above the lowest NLL; the largest ECE
Results = dict[tuple[str, str], HeadResult]  # by set and head


def feature_sets(arguments: argparse.Namespace) -> dict[str, FeatureSet]:
    sets = {"mini": FeatureSet.load(arguments.mini), "cub": FeatureSet.load(arguments.cub)}
    for name, file in FILES.items():
        with np.load(arguments.root / file) as arrays:
            sets[name] = FeatureSet.from_arrays(arrays["X"], arrays["y"])
    return sets


def cell(
    folder: Path, name: str, features: FeatureSet, way: int, shot: int, head: str, episodes: int
) -> HeadResult:
    """One head on one set, from `folder` if it was run before."""
    path = folder / f"{name}-{way}way-{shot}shot-{head}-{episodes}-{features.checksum}.npz"
    if not path.exists():
        sampler = EpisodeSampler(features, way=way, shot=shot)
        result = evaluate({head: make_head(head)}, features, sampler, episodes, unseen=True)[head]
        arrays = {field.name: getattr(result, field.name) for field in fields(result)}
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **{key: value for key, value in arrays.items() if value is not None})
    with np.load(path) as arrays:
        return HeadResult(**arrays)


def table(results: Results, sets: list[str]) -> str:
    """Accuracy / NLL / ECE of every head on every set, and the means over sets."""
    lines = ["| head | " + " | ".join([*sets, "mean"]) + " |", "|---" * (len(sets) + 2) + "|"]
    for head in HEADS:
        figures = np.array([[r.accuracy.mean() * 100, r.nll.mean(), r.ece] for r in of(results, head, sets)])
        rows = [*figures, figures.mean(0)]
        lines.append(f"| `{head}` | " + " | ".join(f"{a:.2f} / {n:.3f} / {e:.3f}" for a, n, e in rows) + " |")
    return "\n".join(lines)


def unseen_table(results: Results, sets: list[str]) -> str:
    """AUROC of every head's top probability and unfamiliarity on queries of unseen classes."""
    lines = ["| by | " + " | ".join([*sets, "mean"]) + " |", "|---" * (len(sets) + 2) + "|"]
    for head in HEADS:
        for name, figure in (
            (f"top probability of `{head}`", "unseen_auroc"),
            (f"unfamiliarity of `{head}`", "unfamiliar_auroc"),
        ):
            found = [getattr(result, figure) for result in of(results, head, sets)]
            if found[0] is not None:
                means = [values.mean() for values in found]
                lines.append(f"| {name} | " + " | ".join(f"{v:.3f}" for v in [*means, np.mean(means)]) + " |")
    refused = [
        result.refused.mean() for result in of(results, DEFAULT_HEAD, sets) if result.refused is not None
    ]
    lines.append(
        "| known queries refused at 5 % | "
        + " | ".join(f"{100 * v:.1f} %" for v in [*refused, np.mean(refused)])
        + " |"
    )
    return "\n".join(lines)


def of(results: Mapping[tuple[str, str], HeadResult], head: str, sets: list[str]) -> list[HeadResult]:
    return [results[name, head] for name in sets]


def failures(results: Results, sets: list[str], shot: int) -> list[str]:
    """Every set on which the head is less accurate, has a higher NLL or a larger ECE than it may."""
    lines = []
    for name in sets:
        ours = results[name, DEFAULT_HEAD]
        for head in HEADS[:-1]:
            mean, interval = (100 * v for v in paired_difference(ours, results[name, head]))
            if mean + interval < 0:
                lines.append(f"{name}, {shot} shots: accuracy {mean:+.2f} ± {interval:.2f} to {head}")
        lowest, head = min((results[name, head].nll.mean(), head) for head in HEADS)
        if ours.nll.mean() > lowest + LOWEST_NLL:
            lines.append(f"{name}, {shot} shots: NLL {ours.nll.mean():.3f}, {head} has {lowest:.3f}")
        if ours.ece > ECE.get(shot, 1.0):
            lines.append(f"{name}, {shot} shots: ECE {ours.ece:.3f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mini", type=Path, required=True)
    parser.add_argument("--cub", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--way", type=int, default=5, help="at most all classes of a set but one")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sets = feature_sets(arguments)
    for shot in arguments.shots:
        results = {}
        for name, features in sets.items():
            way = min(arguments.way, len(features.class_names) - 1)
            for head in HEADS:
                results[name, head] = cell(arguments.out, name, features, way, shot, head, arguments.episodes)
        print(f"\n{arguments.way} ways, {shot} shots, {arguments.episodes} episodes: accuracy / NLL / ECE\n")
        print(
            table(results, list(sets)),
            "\n\nUnseen classes: AUROC\n",
            unseen_table(results, list(sets)),
            sep="\n",
        )
        print("\nFails:", *failures(results, list(sets), shot) or ["nowhere"], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
