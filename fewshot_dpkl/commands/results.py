"""Print the tables and figures of RESULTS.md: every head, mini-ImageNet, CUB, and from one to the other.

    fewshot-dpkl results --work runs/results --out RESULTS.md
    fewshot-dpkl results --work runs/quick --episodes 20 --out /tmp/RESULTS.md

Extracts the features of the novel classes with the shipped backbones, runs every head on the same episodes
and keeps each finished run in --work, so that a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fewshot_dpkl import EpisodeSampler, FeatureSet, evaluate
from fewshot_dpkl.backbones import extract_features, load_backbone
from fewshot_dpkl.commands.cli import add_device_arguments, command_parser, use_device
from fewshot_dpkl.data import load_pixels, open_split
from fewshot_dpkl.experiments.results_page import Cell, cells, draw, page
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads import make_head

TASKS = {  # title: backbone, data set
    "mini-ImageNet": ("conv4-mini-imagenet", "mini-imagenet"),
    "CUB": ("conv4-cub", "cub"),
    "mini-ImageNet backbone on CUB": ("conv4-mini-imagenet", "cub"),
}


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for features and finished runs")
    add("--out", type=Path, default=Path("RESULTS.md"), help="(default: %(default)s)")
    add("--episodes", type=int, default=600)
    add("--seed", type=int, default=0)
    add("--data-root", help="folder of the data sets (default: $FEWSHOT_DPKL_DATA)")
    add_device_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = use_device(arguments)
    results: dict[Cell, dict[str, Any]] = {}
    features: dict[str, FeatureSet] = {}
    with tqdm(cells(list(TASKS)), unit="run", disable=None) as bar:
        for cell in bar:
            bar.set_postfix_str(f"{cell.task}, {cell.shot}-shot, {cell.head}", refresh=True)
            if cell.task not in features:
                features[cell.task] = novel_features(cell.task, arguments, device)
            results[cell] = result_of(cell, features[cell.task], arguments, device)
    figures = arguments.out.parent / "docs" / "results"
    draw(results, list(TASKS), figures)
    text = page(
        results,
        {task: describe(features[task]) for task in TASKS},
        figures.relative_to(arguments.out.parent),
        episodes=arguments.episodes,
        seed=arguments.seed,
        command=f"fewshot-dpkl results --work runs/results --episodes {arguments.episodes} "
        f"--seed {arguments.seed}",
    )
    with atomic_path(arguments.out) as temporary:
        temporary.write_text(text)
    print(text)


def novel_features(task: str, arguments: argparse.Namespace, device: torch.device) -> FeatureSet:
    """Of all pictures of the novel classes; kept in --work for these weights."""
    name, dataset = TASKS[task]
    backbone = load_backbone(name)
    path = arguments.work / f"{dataset}-{name}-{backbone.identity[:12]}.npz"
    if not path.exists():
        split = open_split(dataset, "novel", arguments.data_root)
        rows = extract_features(backbone, load_pixels(split, backbone.resize), device=device)
        card = {"backbone": backbone.card, "dataset": dataset, "split": "novel", "images": len(rows)}
        FeatureSet(rows, split.labels, split.class_names, card).save(path)
    features = FeatureSet.load(path)
    return replace(features, card={**features.card, "backbone": backbone.card})  # maybe newer


def result_of(
    cell: Cell, features: FeatureSet, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """The summary of a head with its accuracy in every episode, run now or read from --work."""
    head = make_head(cell.head)
    identity = {
        "features": features.checksum,
        "episodes": arguments.episodes,
        "seed": arguments.seed,
        "parameters": head.get_params(),
    }
    path = arguments.work / cell.file
    if path.exists():
        saved: dict[str, Any] = json.loads(path.read_text())
        if saved["identity"] == identity:
            return saved
    sampler = EpisodeSampler(features, way=cell.way, shot=cell.shot, query=16, seed=arguments.seed)
    found = evaluate(
        {cell.head: head}, features, sampler, arguments.episodes, unseen=cell.way < 20, device=device
    )[cell.head]
    result = {"identity": identity, **found.summary(), "per_episode": found.accuracy.tolist()}
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(result))
    return result


def describe(features: FeatureSet) -> str:
    card = features.card["backbone"]
    return (
        f"{card.get('name', 'a backbone')} ({card['backbone']}), {len(features.labels)} pictures of "
        f"{len(features.class_names)} classes"
    )
