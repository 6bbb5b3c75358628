"""All heads on six kinds of features: is there one to trust on features that nobody tuned it on?

    python benchmarks/study_calibration.py --mini mini-val.npz --cub cub-val.npz --root FOLDER --episodes 600
    python benchmarks/study_calibration.py --mini mini-val.npz --cub cub-val.npz --root FOLDER --prior

FOLDER holds the files of FILES below, with arrays X and y; the other two are features of validation classes
(`fewshot-dpkl extract --split val`). Prints, for every setting, accuracy, NLL and ECE by head and set, and
where the default head fails; then how well unseen classes are told. A cell that is in --out is not run again:
what stops resumes, and after a change of a head its cells are to be deleted.

With --prior: what the default head does at one shot, where its prior alone decides, with other constants, and
with constants chosen on the other five sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.kept import finished
from fewshot_dpkl import EpisodeSampler, FeatureSet, HeadResult, evaluate, make_head, paired_difference
from fewshot_dpkl.heads import DEFAULT_HEAD, calibrated, means

HEADS = ("nn", "centroid", "cosine", "logreg", "blr", "dblr", "dpkl", DEFAULT_HEAD)
FILES = {
    "fruits": "fruits-efficientnet-lite0.npz",
    "digits": "digits-efficientnet-lite0.npz",
    "tiny": "tiny-imagenet-efficientnet-lite0.npz",
    "banking": "banking77-minilm.npz",
}
LOWEST_NLL, ECE = 0.005, {1: 0.05, 5: 0.03}  # what is allowed above the lowest NLL; the largest ECE
VARIANTS = {
    "as it is": (calibrated, "LEARNT", 1.0),
    "learnt embedding · 2/3": (calibrated, "LEARNT", 2 / 3),
    "learnt embedding · 3/2": (calibrated, "LEARNT", 3 / 2),
    "logistic regression · 2/3": (calibrated, "LOGISTIC", 2 / 3),
    "logistic regression · 3/2": (calibrated, "LOGISTIC", 3 / 2),
    "class means · 2/3": (calibrated, "MEANS", 2 / 3),
    "class means · 3/2": (calibrated, "MEANS", 3 / 2),
    "without the dimensions": (means, "COMMON_WEIGHT", 1e9),
}
"""Of the prior: a constant of a module, and what it is multiplied by."""
Results = dict[tuple[str, str], HeadResult]  # by set and head


def parser_of_sets(description: str | None) -> argparse.ArgumentParser:
    """A parser of the files that `feature_sets` reads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mini", type=Path, required=True, help="features of mini-ImageNet's val classes")
    parser.add_argument("--cub", type=Path, required=True, help="features of CUB's val classes")
    parser.add_argument("--root", type=Path, required=True, help="folder of the other four files")
    return parser


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
    sampler = EpisodeSampler(features, way=way, shot=shot)
    return finished(
        path, lambda: evaluate({head: make_head(head)}, features, sampler, episodes, unseen=True)[head]
    )


def table(results: Results, heads: Sequence[str], sets: list[str], shot: int) -> str:
    """Accuracy / NLL / ECE of every head on every set, and the means over sets."""
    lines = [f"| {shots(shot)} | " + " | ".join([*sets, "mean"]) + " |", "|---" * (len(sets) + 2) + "|"]
    for head in heads:
        figures = np.array([[r.accuracy.mean() * 100, r.nll.mean(), r.ece] for r in of(results, head, sets)])
        rows = [*figures, figures.mean(0)]
        lines.append(f"| `{head}` | " + " | ".join(f"{a:.2f} / {n:.3f} / {e:.3f}" for a, n, e in rows) + " |")
    return "\n".join(lines)


def unseen_table(of_shots: dict[int, Results], heads: Sequence[str], sets: list[str]) -> str:
    """AUROC of every score on queries of unseen classes, mean over the sets, a column for each shot."""
    lines = ["| AUROC | " + " | ".join(map(shots, of_shots)) + " |", "|---" * (len(of_shots) + 1) + "|"]
    for name, figure in (("unfamiliarity", "unfamiliar_auroc"), ("top probability", "unseen_auroc")):
        for head in heads:
            found = [[getattr(r, figure) for r in of(results, head, sets)] for results in of_shots.values()]
            if found[0][0] is not None:
                means = " | ".join(f"{np.mean([values.mean() for values in row]):.3f}" for row in found)
                lines.append(f"| {name} of `{head}` | {means} |")
    lines += ["", "| refused at 5 % | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
    for shot, results in of_shots.items():
        refused = [r.refused.mean() for r in of(results, DEFAULT_HEAD, sets) if r.refused is not None]
        lines.append(f"| {shots(shot)} | " + " | ".join(f"{100 * value:.1f} %" for value in refused) + " |")
    return "\n".join(lines)


def shots(number: int) -> str:
    return "1 shot" if number == 1 else f"{number} shots"


def of(results: Mapping[tuple[str, str], HeadResult], head: str, sets: list[str]) -> list[HeadResult]:
    return [results[name, head] for name in sets]


def failures(results: Results, heads: Sequence[str], sets: list[str], shot: int) -> list[str]:
    """Every set on which the head is less accurate, has a higher NLL or a larger ECE than it may."""
    lines = []
    for name in sets:
        ours = results[name, DEFAULT_HEAD]
        for head in heads:
            mean, interval = (100 * v for v in paired_difference(ours, results[name, head]))
            if mean + interval < 0:
                lines.append(f"{name}, {shots(shot)}: accuracy {mean:+.2f} ± {interval:.2f} to `{head}`")
        lowest, head = min((results[name, head].nll.mean(), head) for head in heads)
        if ours.nll.mean() > lowest + LOWEST_NLL:
            lines.append(f"{name}, {shots(shot)}: NLL {ours.nll.mean():.3f}, `{head}` has {lowest:.3f}")
        if ours.ece > ECE.get(shot, 1.0):
            lines.append(f"{name}, {shots(shot)}: ECE {ours.ece:.3f}")
    return lines


def compare(sets: dict[str, FeatureSet], arguments: argparse.Namespace) -> None:
    """Print the tables of all heads."""
    names, heads = list(sets), tuple(dict.fromkeys([*arguments.heads, DEFAULT_HEAD]))
    of_shots: dict[int, Results] = {shot: {} for shot in arguments.shots}
    for shot, results in of_shots.items():
        for name, features in sets.items():
            way = min(arguments.way, len(features.class_names) - 1)
            for head in heads:
                results[name, head] = cell(arguments.out, name, features, way, shot, head, arguments.episodes)
        print(f"\n{arguments.way} ways, {arguments.episodes} episodes: accuracy / NLL / ECE\n")
        print(table(results, heads, names, shot))
        print("\nFails:", *failures(results, heads, names, shot) or ["nowhere"], sep="\n- ", flush=True)
    print("\nUnseen classes\n", unseen_table(of_shots, heads, names), sep="\n")


def vary_prior(sets: dict[str, FeatureSet], episodes: int) -> None:
    """Print NLL and ECE of the default head at one shot with other constants in its prior."""
    figures = {}
    print("| prior | " + " | ".join([*sets, "mean"]) + " |", "|---" * (len(sets) + 2) + "|", sep="\n")
    for label, (module, constant, factor) in VARIANTS.items():
        with patch.object(module, constant, factor * getattr(module, constant)):
            found = []
            for features in sets.values():
                sampler = EpisodeSampler(features, way=5, shot=1, seed=1)
                result = evaluate({DEFAULT_HEAD: make_head(DEFAULT_HEAD)}, features, sampler, episodes)
                found.append((result[DEFAULT_HEAD].nll.mean(), result[DEFAULT_HEAD].ece))
        figures[label] = np.array(found)
        rows = [*figures[label], figures[label].mean(0)]
        print(f"| {label} | " + " | ".join(f"{n:.3f} / {e:.3f}" for n, e in rows) + " |", flush=True)
    nll = np.array([found[:, 0] for found in figures.values()])  # variants, sets
    others = [np.delete(nll, left_out, 1).mean(1).argmin() for left_out in range(len(sets))]
    chosen = np.array([list(figures.values())[best][i] for i, best in enumerate(others)])
    rows = [*chosen, chosen.mean(0)]
    print("| best on the other five | " + " | ".join(f"{n:.3f} / {e:.3f}" for n, e in rows) + " |")


def main() -> None:
    parser = parser_of_sets(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--way", type=int, default=5, help="at most all classes of a set but one")
    parser.add_argument("--heads", nargs="+", default=HEADS, help="to compare with the default head")
    parser.add_argument("--prior", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sets = feature_sets(arguments)
    if arguments.prior:
        vary_prior(sets, arguments.episodes)
    else:
        compare(sets, arguments)


if __name__ == "__main__":
    main()
