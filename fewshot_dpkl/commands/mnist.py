"""Compare BLR, BNN, DBLR and DPKL on a few labelled digits (appendices B.2 and C.3 of the paper).

    fewshot-dpkl mnist --quick --out runs/mnist-quick
    fewshot-dpkl mnist --models blr bnn dblr dpkl --sizes 100 200 300 400 500 600 700 800 900 1000 \\
        --trials 10 --seed 0 --out runs/mnist

Writes results.json, results.csv, table.md and the pictures error, nll and embedding (PNG and SVG) to --out.
Every finished (model, size) is saved at once: the same command again goes on where it stopped, and may name
more models and sizes. Beside the paper's four models:

  dpkl-lengthscale                                     DPKL, lengthscale chosen from the labelled digits
  blr-plain, bnn-plain                                 logits without the scaling to unit length
  blr-attract, bnn-attract, dblr-attract, dpkl-attract the kernel gradient of SVGD with the sign turned round

The four idx files, gzipped or not, are read in <root>/mnist or <root>/MNIST/raw, or downloaded there
by torchvision. <root> is --data-root, else $FEWSHOT_DPKL_DATA, else fewshot-dpkl/data in
the user's cache folder.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from tqdm import tqdm

from fewshot_dpkl.commands.cli import add_device_arguments, command_parser, use_device
from fewshot_dpkl.data.mnist import Mnist, read_mnist, split_digits
from fewshot_dpkl.experiments.mnist import DEFAULT, MODELS, SETTINGS, Cell, run_cells
from fewshot_dpkl.experiments.mnist.figures import draw, save_embedding
from fewshot_dpkl.experiments.mnist.report import METRICS, report
from fewshot_dpkl.experiments.results import Results
from fewshot_dpkl.files import atomic_path


def parse() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=list(DEFAULT), choices=MODELS, help=f"default: {' '.join(DEFAULT)}",
        metavar="MODEL")  # fmt: skip
    add("--sizes", nargs="+", type=int, help="labelled digits, a tenth for validation (default: 100 to 1000)")
    add("--trials", type=int, help="default: 10")
    add("--seed", type=int, default=0, help="everything follows from it (default: %(default)s)")
    add("--quick", action="store_true", help="a first look: sizes 50 and 100, two trials")
    add("--out", type=Path, required=True, help="folder for the results")
    add("--data-root", type=Path, help="folder that holds mnist/ or MNIST/raw/")
    add_device_arguments(parser)
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or ([50, 100] if arguments.quick else list(range(100, 1001, 100)))
    if arguments.trials is None:
        arguments.trials = 2 if arguments.quick else 10
    return arguments


def make_cells(arguments: argparse.Namespace, digits: Mnist, device: torch.device) -> list[Cell]:
    cells = []
    for size in dict.fromkeys(arguments.sizes):
        split = split_digits(digits.labels, size, arguments.trials, arguments.seed)
        cells += [
            Cell(
                model, size, digits.images, digits.labels, split.training, split.validation,
                digits.test_images, digits.test_labels, arguments.seed, device=str(device),
            )
            for model in dict.fromkeys(arguments.models)
        ]  # fmt: skip
    return sorted(cells, key=lambda cell: -cell.work)  # the longest first, so that no core waits at the end


def main() -> None:
    arguments = parse()
    for name, least in (("trials", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} is {getattr(arguments, name)}; give at least {least}")
    device = use_device(arguments)
    settings = {"trials": arguments.trials, "seed": arguments.seed, **SETTINGS}
    results = Results(arguments.out, settings, METRICS, MODELS)
    digits = read_mnist(arguments.data_root)
    cells = make_cells(arguments, digits, device)
    missing = [cell for cell in cells if cell.key not in results.done]
    drawn = min(arguments.sizes, key=lambda size: abs(size - 100))  # the paper shows embeddings at n = 100
    workers = (arguments.threads or os.cpu_count() or 1) if device.type == "cpu" else 1
    started = time.perf_counter()
    bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
    total = sum(cell.work for cell in missing)
    with tqdm(total=total, bar_format=bar_format, smoothing=0, disable=None) as bar:
        for result in run_cells(missing, workers, lambda cell: bar.update(cell.work / cell.checks)):
            if result.embedding is not None and result.key[1] == drawn:
                save_embedding(arguments.out, drawn, result.embedding, digits.test_labels)
            results.add(result.rows, seconds=round(result.seconds, 3))
            bar.set_description(f"{len(results.done)} done, last {result.key[0]} n = {result.key[1]}")
    seconds = time.perf_counter() - started
    text = report(results)
    with atomic_path(arguments.out / "table.md") as temporary:
        temporary.write_text(text)
    figures = draw(results)
    print(text)
    print(f"{len(missing)} cells in {seconds:.0f} s, {len(cells) - len(missing)} from before")
    print(f"saved {results.path}, results.csv, table.md and {', '.join(path.name for path in figures)}")
