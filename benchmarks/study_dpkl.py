"""What the choices for speed of DPKL and BLR change, on real episodes, each against the slower way.

    python benchmarks/study_dpkl.py frequencies --out runs/study
    python benchmarks/study_dpkl.py start judge --out runs/study
    python benchmarks/study_dpkl.py basis --episodes 100 --out runs/study

Prints tables for docs/heads.md: accuracy and NLL of each variant and the paired difference to the first line.
A finished variant is kept in OUT and not run again, unless the features are others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fewshot_dpkl import BLRHead, DPKLHead, EpisodeSampler, FeatureSet, Head, evaluate
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.evaluation.metrics import mean_interval
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.similarity import Similarity


class SharedStart(DPKLHead):
    """All episodes start from the same layers; class weights and minibatches stay their own."""

    def _streams(self, draws: Sequence[Draws]) -> Tensor:
        return Draws(0).stream().expand(len(draws), -1)


class JudgedByAllFrequencies(DPKLHead):
    """The training error measured with the model itself."""

    def _judge(self, model: Similarity) -> Similarity:
        return model


STUDIES: dict[str, dict[str, Head]] = {
    "frequencies": {
        "R = 1280, all in every step": DPKLHead(frequencies_per_step=1280),
        "R = 1280, 128 a step (default)": DPKLHead(),
        "R = 1280, 64 a step": DPKLHead(frequencies_per_step=64),
        "R = 640, 128 a step": DPKLHead(frequencies=640),
        "R = 512, 128 a step": DPKLHead(frequencies=512),
        "R = 256, 128 a step": DPKLHead(frequencies=256),
        "R = 128": DPKLHead(frequencies=128),
        "closed form": DPKLHead(kernel="exact"),
    },
    "kappa": {"κ in every step": DPKLHead(kappa_every=1), "κ every 25 steps (default)": DPKLHead()},
    "start": {
        "uniform weights": DPKLHead(start="uniform"),
        "signs (default)": DPKLHead(),
        "the same layers in all episodes": SharedStart(),
    },
    "judge": {"judged by all R": JudgedByAllFrequencies(), "judged by the closed form (default)": DPKLHead()},
    "basis": {
        "all D dimensions": DPKLHead(span=False, kappa_every=10),
        "span of the support set": DPKLHead(kappa_every=10),
    },
    "rotation": {
        "any rotation": DPKLHead(rotation="uniform"),
        "signs and Hadamard's matrix (default)": DPKLHead(),
    },
    "blr": {"BLR in all D dimensions": BLRHead(span=False), "BLR in the span (default)": BLRHead()},
    "basis-exact": {
        "closed form, all D dimensions": DPKLHead(kernel="exact", span=False, kappa_every=10),
        "closed form, span of the support set": DPKLHead(kernel="exact", kappa_every=10),
    },
}
FIGURES = ("accuracy", "nll")


def figures(
    head: Head, features: FeatureSet, episodes: int, batch_episodes: int, folder: Path
) -> dict[str, np.ndarray]:
    """Accuracy and NLL `[episodes]` of a head, from the folder if it holds them."""
    key = json.dumps(
        [type(head).__name__, head.get_params(), episodes, features.checksum], sort_keys=True, default=str
    )
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if path.exists():
        stored = json.loads(path.read_text())
    else:
        sampler = EpisodeSampler(features)
        result = evaluate({"head": head}, features, sampler, episodes, batch_episodes=batch_episodes)["head"]
        stored = {"key": key, "seconds": result.seconds}
        stored |= {figure: getattr(result, figure).tolist() for figure in FIGURES}
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(stored))
    return {name: np.array(stored[name]) for name in (*FIGURES, "seconds")}


def table(variants: Mapping[str, dict[str, np.ndarray]]) -> str:
    """Markdown: every variant with its paired difference to the first; accuracies in percent."""
    first = next(iter(variants.values()))
    lines = ["| | accuracy % | difference | NLL | difference | time |", "|---|---|---|---|---|---|"]
    for name, now in variants.items():
        cells = [name]
        for figure, factor, digits in (("accuracy", 100, 2), ("nll", 1, 4)):
            mean, interval = mean_interval(now[figure] - first[figure])
            cells.append(f"{factor * now[figure].mean():.{digits}f}")
            cells.append(
                "" if now is first else f"{factor * mean:+.{digits}f} ± {factor * interval:.{digits}f}"
            )
        cells.append(f"{now['seconds'] / first['seconds']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("--features", type=Path, default=SHIPPED)
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    arguments = parser.parse_args()
    features = FeatureSet.load(arguments.features)
    for study in arguments.studies:
        batch = 4 if "basis" in study else 24  # all D dimensions take 50 MB an episode
        variants = {
            name: figures(head, features, arguments.episodes, batch, arguments.out)
            for name, head in STUDIES[study].items()
        }
        print(f"{study}, {arguments.episodes} episodes, time relative to the first line\n{table(variants)}\n")


if __name__ == "__main__":
    main()
