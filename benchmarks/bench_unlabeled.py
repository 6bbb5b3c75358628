"""Heads that learn from unlabelled examples beside easyfsl's transductive methods, on the same episodes.

    pip install 'fewshot-dpkl[bench]'
    python benchmarks/bench_unlabeled.py --features F.npz --shots 1 5 --episodes 600 --out runs/unlabeled
    python benchmarks/bench_unlabeled.py --query-proportions dirichlet:2

The queries of an episode are its unlabelled examples. Prints accuracy, negative log-likelihood, calibration
error and milliseconds an episode of each, and the difference in accuracy to the head without unlabelled
examples, paired by episode. Methods of easyfsl get unit features, PT-MAP those of absolute sum one, of which
its power transform makes unit ones (on others it fails); scores that are no probabilities go through a
softmax, as with `use_softmax`. Writes bench_unlabeled.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fewshot_dpkl import EpisodeSampler, FeatureSet, Head, HeadResult, evaluate, make_head, paired_difference
from fewshot_dpkl.commands import cli
from fewshot_dpkl.commands.eval import proportions
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.evaluation.tables import FORMATS
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads.base import State

RIVALS = ("SimpleShot", "BDCSPN", "TIM", "LaplacianShot", "PTMAP")


class Rival(Head):
    """A method of easyfsl as a head: it keeps the support set and learns when it is asked."""

    episodes_at_once = 8

    def __init__(self, method: str = "SimpleShot") -> None:
        self.method = method

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        return {"support": support, "labels": labels}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        from easyfsl import methods

        answers = []
        for support, labels, asked in zip(state["support"], state["labels"], query, strict=True):
            norm = 1.0 if self.method == "PTMAP" else 2.0
            method = getattr(methods, self.method)(use_softmax=True, feature_normalization=norm)
            method.process_support_set(support, labels)
            answers.append(method(asked).detach())
        p = torch.stack(answers).clamp_min(1e-12)
        return (p / p.sum(-1, keepdim=True)).log()


class Inductive(Head):
    """A head that is not shown the unlabelled examples."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.episodes_at_once = head.episodes_at_once

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        return self.head.fit_episodes(support, labels, seeds)

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        return self.head.log_proba_episodes(state, query)


def run(
    features: FeatureSet, sampler: EpisodeSampler, head: str, episodes: int, rivals: Sequence[str]
) -> dict[str, HeadResult]:
    """Results by name, the head without unlabelled examples first."""
    heads: dict[str, Callable[[], Head]] = {
        f"{head}, labels alone": lambda: Inductive(make_head(head)),
        head: lambda: make_head(head),
        **{f"easyfsl {name}": lambda name=name: Rival(name) for name in rivals},  # type: ignore[misc]
    }
    results: dict[str, HeadResult] = {}
    for name, make in heads.items():
        start = time.perf_counter()
        results |= evaluate({name: make()}, features, sampler, episodes)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return results


def rows(results: dict[str, HeadResult]) -> list[list[str]]:
    first = next(iter(results.values()))
    table = [["", "accuracy %", "NLL", "ECE", "ms", "difference, paired"]]
    for name, result in results.items():
        figures = result.summary()
        difference, interval = paired_difference(result, first)
        milliseconds = 1000 * result.seconds / len(result.accuracy)
        row = [name, f"{100 * figures['accuracy']:.2f} ± {100 * figures['ci95']:.2f}"]
        row += [f"{figures['nll']:.3f}", f"{figures['ece']:.3f}", f"{milliseconds:.0f}"]
        table.append([*row, "" if result is first else f"{100 * difference:+.2f} ± {100 * interval:.2f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, default=SHIPPED)
    parser.add_argument("--head", default="dpkl-calibrated")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--query-proportions", type=proportions, metavar="dirichlet:A")
    parser.add_argument("--unlabeled", type=int, default=0, help="N more per class, instead of the queries")
    parser.add_argument("--distractors", type=int, default=0)
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", choices=FORMATS, default="markdown")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.rivals and not arguments.unlabeled and find_spec("easyfsl") is None:
        raise ValueError("easyfsl is not installed; `pip install easyfsl`, or give --rivals without names")
    torch.set_num_threads(arguments.threads)
    features = FeatureSet.load(arguments.features)
    summary = {}
    for shot in arguments.shots:
        sampler = EpisodeSampler(
            features, shot=shot, concentration=arguments.query_proportions,
            transductive=not arguments.unlabeled, unlabeled=arguments.unlabeled,
            distractors=arguments.distractors,
        )  # fmt: skip
        rivals = [] if arguments.unlabeled else arguments.rivals  # theirs are the queries
        results = run(features, sampler, arguments.head, arguments.episodes, rivals)
        summary[shot] = {name: result.summary() for name, result in results.items()}
        if arguments.out:
            accuracies = {name: np.round(result.accuracy, 6).tolist() for name, result in results.items()}
            with atomic_path(arguments.out / "bench_unlabeled.json") as path:
                path.write_text(json.dumps({"shots": summary, f"accuracies at {shot}": accuracies}))
        print(f"\n{shot} shot\n\n{FORMATS[arguments.table](rows(results))}\n", flush=True)


if __name__ == "__main__":
    cli.run(main)
