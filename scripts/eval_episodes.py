"""Evaluate few-shot heads on frozen features, all on the same episodes.

    python scripts/eval_episodes.py --head dpkl
    python scripts/eval_episodes.py --features F.npz --head nn --head dblr --head dpkl --out runs/table1
    torchrun --nproc-per-node=2 scripts/eval_episodes.py --head all

Prints accuracy with its 95 % interval (1.96 σ / √episodes), negative log-likelihood, calibration error and
the difference to the first head, paired by episode. The same seed gives the same episodes and results.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
import torch.distributed as distributed
from _cli import add_device_arguments, run, use_device
from tqdm import tqdm

import fewshot_dpkl
from fewshot_dpkl import HEADS, EpisodeSampler, FeatureSet, HeadResult, evaluate, make_head, paired_difference
from fewshot_dpkl.evaluation import process
from fewshot_dpkl.features import SHIPPED
from fewshot_dpkl.files import atomic_path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--features", type=Path, default=SHIPPED, help="features file (default: the shipped one)"
    )
    parser.add_argument(
        "--head", action="append", metavar="NAME", help=f"all, or one of: {', '.join(HEADS)}; can be repeated"
    )
    parser.add_argument("--episodes", type=int, default=600, help="number of episodes (default: %(default)s)")
    parser.add_argument("--way", type=int, default=5, help="classes per episode (default: %(default)s)")
    parser.add_argument(
        "--shot", type=int, default=5, help="support examples per class (default: %(default)s)"
    )
    parser.add_argument("--query", type=int, default=16, help="queries per class (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the episodes and heads (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for results.json and episodes.csv")
    parser.add_argument(
        "--batch-episodes", type=int, default=12, help="episodes trained together (default: %(default)s)"
    )
    add_device_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = use_device(arguments)
    names = list(dict.fromkeys(arguments.head or ["dpkl"]))
    names = list(HEADS) if "all" in names else names
    heads = {name: make_head(name) for name in names}
    features = FeatureSet.load(arguments.features)
    sampler = EpisodeSampler(
        features, way=arguments.way, shot=arguments.shot, query=arguments.query, seed=arguments.seed
    )
    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out} is a file; name a folder")
    if "LOCAL_RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("gloo")
    try:
        results = run_with_bar(heads, features, sampler, arguments, device)
        if process()[0] == 0:
            print(table(results))
            if arguments.out:
                write(arguments, features, sampler, results)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def run_with_bar(
    heads: dict[str, fewshot_dpkl.Head],
    features: FeatureSet,
    sampler: EpisodeSampler,
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, HeadResult]:
    seen: dict[str, list[np.ndarray]] = {name: [] for name in heads}
    rank, world = process()
    total = len(range(rank, arguments.episodes, world)) * len(heads)
    quiet = rank > 0 or not sys.stderr.isatty()
    with tqdm(total=total, unit="episode", disable=quiet, leave=False) as bar:

        def progress(name: str, accuracies: np.ndarray) -> None:
            seen[name].append(accuracies)
            bar.set_description(f"{name} {100 * np.concatenate(seen[name]).mean():.2f} %", refresh=False)
            bar.update(len(accuracies))

        return evaluate(
            heads,
            features,
            sampler,
            arguments.episodes,
            batch_episodes=arguments.batch_episodes,
            device=device,
            progress=progress,
        )


def table(results: dict[str, HeadResult]) -> str:
    """The results as text, accuracies in percent."""
    first = next(iter(results))
    lines = [
        f"{'head':<10}{'accuracy %':>16}{'NLL':>9}{'ECE':>8}{'seconds':>10}   difference to {first}, paired"
    ]
    for name, result in results.items():
        figures = result.summary()
        accuracy = f"{100 * figures['accuracy']:.2f} ± {100 * figures['ci95']:.2f}"
        line = (
            f"{name:<10}{accuracy:>16}{figures['nll']:>9.4f}{figures['ece']:>8.4f}{figures['seconds']:>10.1f}"
        )
        if name != first:
            difference, interval = paired_difference(result, results[first])
            line += f"   {100 * difference:+.2f} ± {100 * interval:.2f}"
        lines.append(line)
    return "\n".join(lines)


def write(
    arguments: argparse.Namespace,
    features: FeatureSet,
    sampler: EpisodeSampler,
    results: dict[str, HeadResult],
) -> None:
    """results.json and episodes.csv, each whole or not at all; accuracies as fractions."""
    settings = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()
    }
    document: dict[str, Any] = {
        "settings": {**settings, "head": list(results)},
        "versions": {
            "fewshot_dpkl": fewshot_dpkl.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "sklearn": sklearn.__version__,
            "python": platform.python_version(),
        },
        "features": {**features.card, "checksum": features.checksum, "examples": len(features)},
        "heads": {name: result.summary() for name, result in results.items()},
    }
    with atomic_path(arguments.out / "results.json") as path:
        path.write_text(json.dumps(document, indent=2) + "\n")
    classes = sampler.draw(range(arguments.episodes)).classes
    with atomic_path(arguments.out / "episodes.csv") as path, path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["episode", "head", "accuracy", "nll", "classes"])
        for name, result in results.items():
            for episode, (accuracy, nll) in enumerate(zip(result.accuracy, result.nll, strict=True)):
                labels = " ".join(features.class_names[c] for c in classes[episode])
                writer.writerow([episode, name, f"{accuracy:.6f}", f"{nll:.6f}", labels])


if __name__ == "__main__":
    run(main)
