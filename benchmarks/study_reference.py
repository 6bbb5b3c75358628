"""Whether the fast DPKL head predicts as well as the reference loop, episode by episode.

    python benchmarks/study_reference.py --frequencies-per-step 128 --kappa-every 25 --out runs/reference
    python benchmarks/study_reference.py --out runs/reference

The reference loop (all D dimensions, autograd) takes ten seconds or more an episode: with the cheaper steps
of our head, as in the first line, or as the paper has it, as in the second. Each finished one is a line of
a CSV file in OUT, and a run that was stopped goes on where it was; `--minutes` stops it by itself,
`--minutes 0` compares what is there. The episodes are `evaluate`'s.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import reference
from benchmarks.bench_heads import own_frequencies
from fewshot_dpkl import DPKLHead, EpisodeSampler, FeatureSet, evaluate
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.evaluation.metrics import mean_interval, score
from fewshot_dpkl.parallel import on_every_core

FIGURES = ("accuracy", "nll", "brier")


def finished(path: Path, checksum: str) -> dict[int, list[float]]:
    """Figures of the episodes in the file, which must be of the same features."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if any(row["features"] != checksum for row in rows):
        raise ValueError(f"{path} holds episodes of other features; give another --out")
    return {int(row["episode"]): [float(row[figure]) for figure in FIGURES] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, default=SHIPPED)
    parser.add_argument("--kernel", choices=["rff", "exact"], default="rff")
    parser.add_argument("--frequencies-per-step", type=int, help="of the reference (default: all)")
    parser.add_argument("--kappa-every", type=int, default=1, help="of the reference (default: every step)")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no episode after that")
    parser.add_argument("--out", type=Path, default=Path("runs/reference"))
    arguments = parser.parse_args()
    features = FeatureSet.load(arguments.features)
    table = torch.as_tensor(features.features.astype(np.float32))
    sampler = EpisodeSampler(features)
    frequencies = own_frequencies() if arguments.kernel == "rff" else None

    last = time.monotonic() + 60 * arguments.minutes

    def run(number: int) -> tuple[int, list[float] | None]:
        """One episode through the reference loop: its number and, if there was time for it, its figures."""
        if time.monotonic() >= last:
            return number, None
        episode = sampler.draw(range(number, number + 1))
        support, query = (table[rows.ravel()] for rows in (episode.support, episode.query))
        labels = torch.arange(sampler.way).repeat_interleave(sampler.shot)
        p = reference.dpkl(
            support,
            labels,
            query,
            int(episode.seeds[0]),
            frequencies=frequencies,
            frequencies_per_step=arguments.frequencies_per_step,
            kappa_every=arguments.kappa_every,
        )
        scores = score(p.log().view(1, sampler.way, sampler.query, sampler.way))
        return number, [float(scores[figure][0]) for figure in FIGURES]

    settings = f"{arguments.kernel}-{arguments.frequencies_per_step or 'all'}-{arguments.kappa_every}"
    path = arguments.out / f"reference-{settings}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = finished(path, features.checksum)
    except ValueError as error:
        parser.error(str(error))
    missing = [number for number in range(arguments.episodes) if number not in done]
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(["episode", "features", *FIGURES])
        for number, figures in on_every_core(run, missing, torch.get_num_threads()):
            if figures is None:
                continue
            writer.writerow([number, features.checksum, *figures])
            file.flush()
            done[number] = figures

    numbers = [number for number in range(arguments.episodes) if number in done]
    print(f"{len(numbers)} of {arguments.episodes} reference episodes in {path}")
    if len(numbers) < (2 if arguments.minutes == 0 else arguments.episodes):
        return
    head = {"dpkl": DPKLHead(kernel=arguments.kernel)}
    ours = evaluate(head, features, sampler, max(numbers) + 1)["dpkl"].per_episode
    for column, figure in enumerate(FIGURES):
        theirs = np.array([done[number][column] for number in numbers])
        difference, interval = mean_interval(ours[figure][numbers] - theirs)
        print(
            f"{figure:>8}: head {ours[figure][numbers].mean():.4f}, reference {theirs.mean():.4f}, "
            f"difference {difference:+.4f} ± {interval:.4f}"
        )


if __name__ == "__main__":
    main()
