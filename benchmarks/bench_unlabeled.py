"""Heads that learn from unlabelled examples beside easyfsl's transductive methods, on the same episodes.

    pip install 'fewshot-dpkl[bench]'
    python benchmarks/bench_unlabeled.py --features F.npz --shots 1 5 --episodes 600
    python benchmarks/bench_unlabeled.py --query-proportions dirichlet:2
    python benchmarks/bench_unlabeled.py --unlabeled 30 --distractors 5

The queries of an episode are its unlabelled examples; with --unlabeled N they are N others of each class, and
only our head can learn from such. Prints accuracy, negative log-likelihood, calibration error and
milliseconds an episode of each, and two differences in accuracy, paired by episode: to the head without
unlabelled examples, and of the head with them to each. Methods of easyfsl get unit features, PT-MAP those of
absolute sum one, of which its power transform makes unit ones (on others it fails); scores that are no
probabilities go through a softmax, as with `use_softmax`. What is finished is kept in --out and not run
again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kept import finished
from fewshot_dpkl import EpisodeSampler, FeatureSet, Head, HeadResult, evaluate, make_head, paired_difference
from fewshot_dpkl.commands import cli
from fewshot_dpkl.commands.eval import proportions
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.evaluation.tables import FORMATS
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
    features: FeatureSet, sampler: EpisodeSampler, head: str, episodes: int, rivals: Sequence[str], kept: str
) -> dict[str, HeadResult]:
    """Results by name, the head without unlabelled examples first; of before, from files named as `kept`."""
    heads: dict[str, Head] = {
        f"{head}, labels alone": Inductive(make_head(head)),
        head: make_head(head),
        **{f"easyfsl {name}": Rival(name) for name in rivals},
    }
    return {
        name: finished(
            Path(kept.format(name.replace(" ", "-"))), partial(one, name, made, features, sampler, episodes)
        )
        for name, made in heads.items()
    }


def one(name: str, head: Head, features: FeatureSet, sampler: EpisodeSampler, episodes: int) -> HeadResult:
    result = evaluate({name: head}, features, sampler, episodes)[name]
    print(f"{name}: {result.seconds:.0f} s", file=sys.stderr)
    return result


def rows(results: dict[str, HeadResult], episodes: int) -> list[list[str]]:
    first, ours = list(results.values())[:2]
    table = [["", "accuracy %", "NLL", "ECE", "ms", "gain over labels alone", "ours above it"]]

    def difference(result: HeadResult, other: HeadResult) -> str:
        if result is other:
            return ""
        mean, interval = paired_difference(result, other)
        return f"{100 * mean:+.2f} ± {100 * interval:.2f}"

    for name, result in results.items():
        figures = result.summary()
        row = [name, f"{100 * figures['accuracy']:.2f} ± {100 * figures['ci95']:.2f}"]
        row += [f"{figures['nll']:.3f}", f"{figures['ece']:.3f}", f"{1000 * result.seconds / episodes:.0f}"]
        table.append([*row, difference(result, first), difference(ours, result)])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, default=SHIPPED)
    parser.add_argument("--head", default="dpkl-calibrated")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--query-proportions", type=proportions, metavar="dirichlet:A")
    parser.add_argument("--unlabeled", type=int, default=0, help="N more per class, instead of the queries")
    parser.add_argument("--distractors", type=int, default=0)
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", choices=FORMATS, default="markdown")
    parser.add_argument("--out", type=Path, default=Path("runs/unlabeled"))
    arguments = parser.parse_args()
    if arguments.rivals and not arguments.unlabeled and find_spec("easyfsl") is None:
        raise ValueError("easyfsl is not installed; `pip install easyfsl`, or give --rivals without names")
    torch.set_num_threads(arguments.threads)
    features = FeatureSet.load(arguments.features)
    for shot in arguments.shots:
        sampler = EpisodeSampler(
            features, shot=shot, concentration=arguments.query_proportions, seed=arguments.seed,
            transductive=not arguments.unlabeled, unlabeled=arguments.unlabeled,
            distractors=arguments.distractors,
        )  # fmt: skip
        rivals = [] if arguments.unlabeled else arguments.rivals  # theirs are the queries
        setting = f"{shot}shot-{arguments.unlabeled}-{arguments.distractors}-{arguments.query_proportions}"
        setting += f"-{arguments.episodes}-seed{arguments.seed}-{features.checksum}.npz"
        kept = f"{arguments.out / '{}'}-{setting}"
        results = run(features, sampler, arguments.head, arguments.episodes, rivals, kept)
        table = FORMATS[arguments.table](rows(results, arguments.episodes))
        print(f"\n{arguments.features.stem}, {shot} shot\n\n{table}\n", flush=True)


if __name__ == "__main__":
    cli.run(main)
