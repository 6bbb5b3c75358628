"""Compare GP, DKL and DPKL, and their semi-supervised forms, on small regression sets (section 4).

    fewshot-dpkl uci --datasets skillcraft parkinsons elevators \\
        --models gp ssgp dkl ssdkl dpkl ssdpkl --sizes 50 100 200 300 400 500 --trials 10 \\
        --unlabeled 10000 --seed 0 --out runs/uci
    fewshot-dpkl uci --datasets my.csv:price --models dkl dpkl --sizes 100 --out runs/mine

Writes results.json, results.csv, table.md and the figures rmse, nll and embeddings (PNG and SVG) to --out.
Every finished (data set, model, size) is saved at once: the same command again goes on where it stopped.

A data set is <root>/uci/<name>/ or <root>/<name>/ with X.npy and y.npy, or FILE.csv:TARGET. <root> is
--data-root, else $FEWSHOT_DPKL_DATA, else fewshot-dpkl/data in the user's cache folder. The paper's six:
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from tqdm import tqdm

from fewshot_dpkl.commands.cli import add_device_arguments, command_parser, use_device
from fewshot_dpkl.data.uci import ARRAYS, SOURCES, read_uci, split_trials
from fewshot_dpkl.experiments.uci.figures import draw
from fewshot_dpkl.experiments.uci.sweep import MODELS, Cell, Results, run_cells
from fewshot_dpkl.files import atomic_path


def parse() -> argparse.Namespace:
    sources = "".join(f"  {name:11s} {source}\n" for name, source in SOURCES.items())
    parser = command_parser(f"{__doc__}{sources}{ARRAYS}.")
    add = parser.add_argument
    add(
        "--datasets",
        nargs="+",
        default=["skillcraft", "parkinsons", "elevators"],
        help="names or FILE.csv:TARGET",
    )
    add("--models", nargs="+", default=list(MODELS), choices=MODELS, help="default: all six")
    add("--sizes", nargs="+", type=int, default=[50, 100, 200, 300, 400, 500], help="labelled points")
    add("--trials", type=int, default=10, help="default: %(default)s")
    add(
        "--unlabeled",
        type=int,
        default=10000,
        help="at most so many unlabelled points (default: %(default)s)",
    )
    add("--test", type=int, default=1000, help="test points, the same in every trial (default: %(default)s)")
    add("--learn", action="store_true", help="beyond the paper: learn noise variance and lengthscale")
    add("--seed", type=int, default=0, help="everything follows from it (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder for the results")
    add("--data-root", type=Path, help="folder that holds uci/")
    add_device_arguments(parser)
    return parser.parse_args()


def make_cells(arguments: argparse.Namespace, device: str) -> list[Cell]:
    cells = []
    for dataset in dict.fromkeys(arguments.datasets):
        x, y = read_uci(dataset, arguments.data_root)
        for size in dict.fromkeys(arguments.sizes):
            split = split_trials(
                len(x),
                size,
                arguments.trials,
                unlabelled=arguments.unlabeled,
                test=arguments.test,
                seed=arguments.seed,
            )
            rows = (split.test, split.training, split.labelled, split.unlabelled)
            cells += [
                Cell(dataset, model, size, x, y, *rows, arguments.seed, device, arguments.learn)
                for model in dict.fromkeys(arguments.models)
            ]
    return sorted(cells, key=lambda cell: -cell.work)  # the longest first, so that no core waits at the end


def main() -> None:
    arguments = parse()
    for name, least in (("trials", 1), ("unlabeled", 0), ("test", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} is {getattr(arguments, name)}; give at least {least}")
    if min(arguments.sizes) < 2:
        raise ValueError(f"--sizes has {min(arguments.sizes)}; give at least 2 labelled points")
    device = use_device(arguments)
    kind = "cpu" if device.type == "mps" else str(device)  # mps has no float64
    settings = {name: getattr(arguments, name) for name in ("trials", "unlabeled", "test", "seed")}
    arguments.out.mkdir(parents=True, exist_ok=True)  # what cannot be written to fails now, not after hours
    results = Results(arguments.out, {**settings, **({"learn": True} if arguments.learn else {})})
    cells = make_cells(arguments, kind)
    missing = [cell for cell in cells if cell.key not in results.done]
    workers = (arguments.threads or os.cpu_count() or 1) if kind == "cpu" else 1
    started = time.perf_counter()
    work = {cell.key: cell.work / 1e9 for cell in cells}
    bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
    with tqdm(total=sum(work.values()), bar_format=bar_format, disable=None) as bar:
        bar.update(sum(work[cell.key] for cell in cells) - sum(work[cell.key] for cell in missing))
        for result in run_cells(missing, workers):
            results.add_cell(result)
            bar.update(work[result.key])
            finished = sum(cell.key in results.done for cell in cells)
            bar.set_description(f"{finished}/{len(cells)} {' '.join(map(str, result.key))}")
    tables = results.tables()
    with atomic_path(arguments.out / "table.md") as temporary:
        temporary.write_text(f"{tables}\n")
    figures = draw(results)
    print(f"{tables}\n")
    seconds = time.perf_counter() - started
    print(f"{len(missing)} cells in {seconds:.0f} s, {len(cells) - len(missing)} from before")
    print(f"saved {results.path}, results.csv, table.md and {', '.join(path.name for path in figures)}")
