"""What unlabelled examples give a head on six kinds of features, and whether they ever do harm.

    python benchmarks/study_unlabelled.py --mini mini-val.npz --cub cub-val.npz --root FOLDER --episodes 200
    ... --settings "queries, even" --sets mini cub --head dpkl dblr --alpha 1 10

Sets and files as in study_calibration.py. By set and shots: accuracy / NLL / ECE on labels alone, and the
paired gain in accuracy with NLL and ECE with the queries as unlabelled examples, even and in proportions of a
Dirichlet(2), with other examples than the queries, and with as many distractors among these. What is finished
is kept in --out and not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_unlabeled import Inductive, one
from benchmarks.kept import finished
from benchmarks.study_calibration import feature_sets, parser_of_sets
from fewshot_dpkl import EpisodeSampler, FeatureSet, Head, HeadResult, make_head, paired_difference
from fewshot_dpkl.heads import DEFAULT_HEAD
from fewshot_dpkl.heads.base import State
from fewshot_dpkl.heads.unlabelled import learnt_with

WAY, QUERY = 5, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "queries, even": {"transductive": True},
    "queries, Dirichlet(2)": {"transductive": True, "concentration": 2.0},
    "other examples": {"unlabeled": 30},
    "half distractors": {"unlabeled": 30, "distractors": WAY},
}


class Once(Head):
    """A head that learns from a support set once, whatever unlabelled examples come with it."""

    learns_from_unlabeled = True

    def __init__(self, head: Head) -> None:
        self.head, self.episodes_at_once = head, head.episodes_at_once
        self.known: dict[tuple[int, ...], State] = {}

    def fit_episodes(
        self, support: Tensor, labels: Tensor, seeds: Sequence[int], unlabeled: Tensor | None = None
    ) -> State:
        if tuple(seeds) not in self.known:
            self.known[tuple(seeds)] = self.head.fit_episodes(support, labels, seeds)
        return learnt_with(self.head, self.known[tuple(seeds)], support, labels, unlabeled)

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        return self.head.log_proba_episodes(state, query)


def options(features: FeatureSet, shot: int, setting: str) -> dict[str, Any]:
    """Of the sampler; fewer unlabelled examples where a class has fewer."""
    given = dict(SETTINGS[setting])
    if "unlabeled" in given:
        left = int(np.bincount(features.labels).min()) - shot - QUERY
        given["unlabeled"] = min(given["unlabeled"], left)
    return given


def results(
    folder: Path,
    name: str,
    features: FeatureSet,
    shot: int,
    head: str,
    episodes: int,
    seed: int,
    settings: Sequence[str],
    **given: Any,
) -> dict[str, tuple[HeadResult, HeadResult]]:
    """On labels alone and with unlabelled examples, by setting."""
    made, found = make_head(head, **given), {}
    made = made if "alpha" in made.get_params() else Once(made)  # alpha: they learn from both in one training
    for setting in settings:
        chosen = options(features, shot, setting)
        sampler = EpisodeSampler(features, way=WAY, shot=shot, query=QUERY, seed=seed, **chosen)
        uneven = {key: value for key, value in chosen.items() if key == "concentration"}
        both = []
        for of, learner in ((uneven, Inductive(made)), (chosen, made)):
            described = "-".join(f"{key}{value}" for key, value in {**of, **given}.items()) or "alone"
            path = folder / f"{name}-{shot}shot-{head}-{described}-{episodes}-{seed}-{features.checksum}.npz"
            both.append(finished(path, partial(one, head, learner, features, sampler, episodes)))
        found[setting] = both[0], both[1]
    return found


def row(name: str, found: dict[str, tuple[HeadResult, HeadResult]]) -> tuple[str, list[float]]:
    first = next(iter(found.values()))[0]
    cells = [name, f"{100 * first.accuracy.mean():.2f} / {first.nll.mean():.3f} / {first.ece:.3f}"]
    gains = []
    for alone, taught in found.values():
        gain, interval = (100 * value for value in paired_difference(taught, alone))
        gains.append(gain)
        cells.append(f"{gain:+.2f} ± {interval:.2f} / {taught.nll.mean():.3f} / {taught.ece:.3f}")
    return "| " + " | ".join(cells) + " |", gains


def print_table(
    sets: dict[str, FeatureSet], shots: Sequence[int], head: str, arguments: argparse.Namespace, **given: Any
) -> None:
    described = ", ".join([f"`{head}`", *(f"{key} = {value}" for key, value in given.items())])
    print(f"\n{described}, {arguments.episodes} episodes, seed {arguments.seed}\n")
    print("| | labels alone: accuracy % / NLL / ECE | " + " | ".join(arguments.settings) + " |")
    print("|---" * (len(arguments.settings) + 2) + "|")
    for shot in shots:
        gains = []
        for name, features in sets.items():
            run = arguments.episodes, arguments.seed, arguments.settings
            found = results(arguments.out, name, features, shot, head, *run, **given)
            line, gained = row(f"{name}, {shot} shot", found)
            print(line, flush=True)
            gains.append(gained)
        print(f"| mean, {shot} shot | | " + " | ".join(f"{gain:+.2f}" for gain in np.mean(gains, 0)) + " |")


def main() -> None:
    parser = parser_of_sets(__doc__)
    parser.add_argument("--head", nargs="+", default=[DEFAULT_HEAD])
    parser.add_argument("--alpha", type=float, nargs="*", default=[], help="of dpkl and dblr")
    parser.add_argument("--sets", nargs="*", help="only these")
    parser.add_argument("--out", type=Path, default=Path("runs/unlabelled"))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sets = {name: s for name, s in feature_sets(arguments).items() if name in (arguments.sets or [name])}
    for head in arguments.head:
        for given in [{"alpha": alpha} for alpha in arguments.alpha] or [{}]:
            print_table(sets, arguments.shots, head, arguments, **given)


if __name__ == "__main__":
    main()
