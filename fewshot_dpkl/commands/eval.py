"""Evaluate few-shot heads on frozen features, all on the same episodes.

    fewshot-dpkl eval --head dpkl
    fewshot-dpkl eval --features F.npz --head nn --head dblr --head dpkl --out runs/table1
    fewshot-dpkl eval --head dpkl --head my_module:MyHead --head sklearn.linear_model:LogisticRegression
    fewshot-dpkl eval --head all --sweep-shot 1 5 10 --unseen --report report.html
    fewshot-dpkl eval --head dpkl-calibrated --shot 1 --unlabeled 30 --distractors 5
    torchrun --nproc-per-node=2 -m fewshot_dpkl eval --head all

Prints accuracy with its 95 % interval (1.96 σ / √episodes), negative log-likelihood, calibration error and
the difference to the first head, paired by episode; below, Brier score, accuracy on the 80 % of queries the
head is surest of, mean entropy of right and wrong answers. docs/evaluation.md defines them. The same seed
gives the same episodes and results. F.npz is a file of features, see fewshot-dpkl extract.
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
from tqdm import tqdm

import fewshot_dpkl
from fewshot_dpkl import HEADS, EpisodeSampler, FeatureSet, HeadResult, evaluate, paired_difference
from fewshot_dpkl.commands.cli import add_device_arguments, command_line, command_parser, use_device
from fewshot_dpkl.evaluation.evaluator import PER_EPISODE, by_class, paired_differences, process
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.evaluation.names import readable
from fewshot_dpkl.evaluation.report import report
from fewshot_dpkl.evaluation.tables import FORMATS, unseen_rows
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads import find_heads

COMPARED = ["nn", "dpkl", "dpkl-calibrated"]  # where nobody names a head
ADVICE = (
    "\nUse dpkl-calibrated; dpkl is the paper's head, nn its baseline (docs/calibration.md compares all)."
)

Setting = tuple[int, int]  # way, shot
Results = dict[str, HeadResult]  # by head


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument(
        "--features", type=Path, default=SHIPPED, help="features file (default: the shipped one)"
    )
    parser.add_argument(
        "--head",
        action="append",
        metavar="NAME",
        help=f"one of: {', '.join(HEADS)}; can be repeated; or all, which leaves out bnn: it trains in all "
        "feature dimensions, many times slower than the others; or package.module:Name for a head of your "
        "own or any scikit-learn classifier with predict_proba",
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
    parser.add_argument(
        "--sweep-shot", type=int, nargs="+", default=[], metavar="N", help="also these shots, at --way"
    )
    parser.add_argument(
        "--sweep-way", type=int, nargs="+", default=[], metavar="N", help="also these ways, at --shot"
    )
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="also ask queries of a class outside the episode: how well the top probability and the head's "
        "unfamiliarity tell them from known ones",
    )
    add_unlabeled_arguments(parser)
    parser.add_argument(
        "--table", choices=FORMATS, default="plain", help="how tables are printed (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for results.json and episodes.csv")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="one page that shows it all")
    parser.add_argument(
        "--batch-episodes", type=int, help="episodes trained together (default: as many as suit the head)"
    )
    add_device_arguments(parser)
    return parser.parse_args()


def add_unlabeled_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("unlabelled examples, for the heads that learn from them")
    group.add_argument(
        "--transductive", action="store_true", help="an episode's queries are its unlabelled examples"
    )
    group.add_argument(
        "--unlabeled",
        type=int,
        default=0,
        metavar="N",
        help="N more examples of each class, none of them in support set or queries",
    )
    group.add_argument(
        "--distractors",
        type=int,
        default=0,
        metavar="K",
        help="as many unlabelled examples of each of K classes outside the episode",
    )
    parser.add_argument(
        "--query-proportions",
        type=proportions,
        metavar="dirichlet:A",
        help="uneven numbers of queries, in proportions of each episode's own (Veilleux et al., 2021: A = 2)",
    )


def proportions(text: str) -> float:
    """A of `dirichlet:A`."""
    kind, _, value = text.partition(":")
    try:
        concentration = float(value)
    except ValueError:
        concentration = 0.0
    if kind != "dirichlet" or not 0 < concentration < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form dirichlet:A with A above 0, as dirichlet:2"
        )
    return concentration


def main() -> None:
    arguments = parse()
    device = use_device(arguments)
    names = list(dict.fromkeys(arguments.head or COMPARED))
    names = [name for name in HEADS if name != "bnn"] if "all" in names else names
    features = FeatureSet.load(arguments.features)
    heads = dict(find_heads(names, HEADS))
    samplers = {
        (way, shot): EpisodeSampler(
            features, way=way, shot=shot, query=arguments.query, seed=arguments.seed,
            concentration=arguments.query_proportions, transductive=arguments.transductive,
            unlabeled=arguments.unlabeled, distractors=arguments.distractors,
        )
        for way, shot in settings(arguments)
    }  # fmt: skip
    check_targets(arguments)
    if "LOCAL_RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("gloo")
    try:
        results = run_with_bar(heads, features, samplers, arguments, device)
        if process()[0] == 0:
            write(arguments, features, samplers, results)
            print("\n\n".join(text(setting, found, arguments) for setting, found in results.items()))
            if not arguments.head:
                print(ADVICE)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def sweeps(arguments: argparse.Namespace) -> dict[str, list[Setting]]:
    """The settings of each sweep that was asked for, in order."""
    shots = [(arguments.way, shot) for shot in sorted(set(arguments.sweep_shot))]
    ways = [(way, arguments.shot) for way in sorted(set(arguments.sweep_way))]
    return {name: swept for name, swept in (("shot", shots), ("way", ways)) if swept}


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """What to evaluate: --way and --shot first, then the sweeps, nothing twice."""
    first = arguments.way, arguments.shot
    return list(dict.fromkeys([first, *(s for swept in sweeps(arguments).values() for s in swept)]))


def check_targets(arguments: argparse.Namespace) -> None:
    """Refuse, before the work, what could not be written after it."""
    if arguments.out and arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out} is a file; name a folder")
    if arguments.report and arguments.report.is_dir():
        raise ValueError(f"--report {arguments.report} is a folder; name a file, such as report.html")
    for target in filter(None, (arguments.out, arguments.report)):
        nearest = next(parent for parent in target.absolute().parents if parent.exists())
        if not nearest.is_dir():
            raise ValueError(f"{target} cannot be made, because {nearest} is a file; choose another place")


def run_with_bar(
    heads: dict[str, fewshot_dpkl.Head],
    features: FeatureSet,
    samplers: dict[Setting, EpisodeSampler],
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[Setting, Results]:
    rank, world = process()
    total = len(range(rank, arguments.episodes, world)) * len(heads) * len(samplers)
    quiet = rank > 0 or not sys.stderr.isatty()
    results = {}
    with tqdm(total=total, unit="episode", disable=quiet, leave=False) as bar:
        for (way, shot), sampler in samplers.items():
            seen: dict[str, list[np.ndarray]] = {name: [] for name in heads}

            def progress(name: str, accuracies: np.ndarray, seen: dict[str, list[np.ndarray]] = seen) -> None:
                seen[name].append(accuracies)
                bar.set_description(f"{name} {100 * np.concatenate(seen[name]).mean():.2f} %", refresh=False)
                bar.update(len(accuracies))

            swept = way != arguments.way
            results[way, shot] = evaluate(
                heads,
                features,
                sampler,
                arguments.episodes,
                unseen=arguments.unseen and not (swept and way == len(features.class_names)),
                batch_episodes=arguments.batch_episodes,
                device=device,
                progress=progress,
            )
    return results


def text(setting: Setting, results: Results, arguments: argparse.Namespace) -> str:
    """The results of one setting as two tables, accuracies in percent."""
    first = next(iter(results))
    main = [["head", "accuracy %", "NLL", "ECE", "seconds", f"difference to {first}, paired"]]
    more = [["head", "Brier", "accuracy % at 80 %", "entropy right", "entropy wrong"]]
    unseen = results[first].unseen_auroc is not None
    unlabeled = arguments.transductive or arguments.unlabeled
    if unlabeled:
        main[0].append("unlabelled")
    for name, result in results.items():
        figures = result.summary()
        difference = percent(*paired_difference(result, results[first]), sign="+") if name != first else ""
        accuracy = percent(figures["accuracy"], figures["ci95"])
        row = [name, accuracy, f"{figures['nll']:.4f}", f"{figures['ece']:.4f}"]
        main.append([*row, f"{figures['seconds']:.1f}", difference])
        if unlabeled:
            main[-1].append("seen" if result.saw_unlabeled else "not seen")
        entropies = [figures["entropy_right"], figures["entropy_wrong"]]
        row = [name, f"{figures['brier']:.4f}"]
        row.append(percent(figures["accuracy_at_80"], figures["accuracy_at_80_ci95"]))
        row += ["-" if entropy is None else f"{entropy:.3f}" for entropy in entropies]
        more.append(row)
    table, comment = FORMATS[arguments.table], "% " * (arguments.table == "latex")
    lines = [table(main), "", table(more)]
    if unseen:
        lines += ["", table(unseen_rows({name: result.summary() for name, result in results.items()}))]
    if sweeps(arguments):
        space = [""] * (arguments.table == "markdown")
        lines = [f"{comment}{setting[0]}-way {setting[1]}-shot", *space, *lines]
    if arguments.unseen and not unseen:
        lines.append(f"{comment}no class is left unseen in {setting[0]}-way tasks")
    return "\n".join(lines)


def percent(value: float, interval: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f} ± {100 * interval:.2f}"


def write(
    arguments: argparse.Namespace,
    features: FeatureSet,
    samplers: dict[Setting, EpisodeSampler],
    results: dict[Setting, Results],
) -> None:
    """results.json, episodes.csv and the report, each whole or not at all; accuracies as fractions."""
    classes = {setting: s.draw(range(arguments.episodes)).classes for setting, s in samplers.items()}
    content = json.dumps(document(arguments, features, classes, results), indent=2)
    if arguments.out:
        with atomic_path(arguments.out / "results.json") as path:
            path.write_text(content + "\n")
        rows = episode_rows(features, classes, results)
        with atomic_path(arguments.out / "episodes.csv") as path, open(path, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    if arguments.report:
        with atomic_path(arguments.report) as path:
            path.write_text(report(json.loads(content)), encoding="utf-8")


def document(
    arguments: argparse.Namespace,
    features: FeatureSet,
    classes: dict[Setting, np.ndarray],
    results: dict[Setting, Results],
) -> dict[str, Any]:
    """What results.json holds: the run at --way and --shot, and the sweeps beside it."""
    first = arguments.way, arguments.shot
    values = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    summaries = {
        setting: {
            "heads": {name: result.summary() for name, result in found.items()},
            "paired": paired_differences(found),
        }
        for setting, found in results.items()
    }
    return {
        "command": command_line(process()[1]),
        "settings": {**values, "head": list(results[first])},
        "versions": {
            "fewshot_dpkl": fewshot_dpkl.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "sklearn": sklearn.__version__,
            "python": platform.python_version(),
        },
        "features": {**features.card, "checksum": features.checksum, "examples": len(features)},
        **summaries[first],
        "classes": by_class(results[first], classes[first], readable(features.class_names)),
        "sweeps": {
            name: [{"way": way, "shot": shot, **summaries[way, shot]} for way, shot in swept]
            for name, swept in sweeps(arguments).items()
        },
    }


def episode_rows(
    features: FeatureSet, classes: dict[Setting, np.ndarray], results: dict[Setting, Results]
) -> list[list[object]]:
    """One row per episode and head, under a row of headings."""
    rows: list[list[object]] = []
    held = {name for found in results.values() for result in found.values() for name in result.per_episode}
    figures = [name for name in PER_EPISODE if name in held]
    for (way, shot), found in results.items():
        for name, result in found.items():
            columns = [result.per_episode.get(figure) for figure in figures]
            for episode, labels in enumerate(classes[way, shot]):
                values = ["" if column is None else f"{column[episode]:.6f}" for column in columns]
                drawn = " ".join(features.class_names[c] for c in labels)
                rows.append([episode, name, way, shot, *values, drawn])
    return [["episode", "head", "way", "shot", *figures, "classes"], *rows]
