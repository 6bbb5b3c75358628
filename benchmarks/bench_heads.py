"""How fast the heads are, as ratios measured in one run on the same episodes.

    python benchmarks/bench_heads.py --out runs/bench
    python benchmarks/bench_heads.py --quick

Times (a) reference loops, one episode at a time in plain PyTorch (benchmarks/reference.py): the paper's
algorithm as it stands, and with the choices of our heads that make a step cheaper (κ every 25 steps, a block
of frequencies in each); (b) our heads, DPKL and DBLR also as on a machine without a C compiler; (c) what a
user would pick instead: scikit-learn's logistic regression and nearest neighbour, episode by episode. All
take turns in several rounds, so that a machine that is slow for a while is slow for all. Then how the time of
DPKL grows with each size, what several processes gain over threads, and how far its training step is from the
machine's measured matrix-product rate. Writes bench_heads.json and .png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from tqdm import tqdm

from benchmarks import reference
from fewshot_dpkl import HEADS, DPKLHead, EpisodeSampler, FeatureSet, Head, evaluate, make_head
from fewshot_dpkl.evaluation.evaluator import score_head
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads.training import compiled
from fewshot_dpkl.kernels import random_frequencies
from fewshot_dpkl.parallel import on_every_core

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS: dict[str, Callable[[], Head]] = {
    "dpkl": DPKLHead,
    "dpkl, exact kernel": partial(DPKLHead, kernel="exact"),
    **{name: partial(make_head, name) for name in HEADS if name not in ("dpkl", "bnn")},
}
UNCOMPILED = ", no compiler"  # behind the names of heads
OURS |= {name + UNCOMPILED: OURS[name] for name in ("dpkl", "dpkl, exact kernel", "dblr")}
RIVAL_OF = {  # reference loop or library: which of our heads it is compared with
    "reference dpkl": "dpkl",
    "reference dpkl, our choices": "dpkl",
    "reference dpkl, exact kernel": "dpkl, exact kernel",
    "reference dpkl, exact kernel, our choices": "dpkl, exact kernel",
    "reference dblr": "dblr",
    "reference cosine": "cosine",
    "scikit-learn logistic regression": "dpkl",
    "scikit-learn 1-NN": "nn",
}
SWEEPS: dict[str, list[int]] = {
    "episodes in a batch": [1, 4, 12, 24, 48],
    "features D": [100, 400, 1600, 3200],
    "particles m": [1, 5, 10, 20],
    "way": [2, 5, 10, 20],
    "shot": [1, 5, 10, 20],  # in 5-way tasks: n = 5 to 100 support points
}


def rivals() -> dict[str, Callable[..., np.ndarray | Tensor]]:
    """name → function(support, labels, query, seed) → class probabilities or predictions `[q, C]`."""
    generator = torch.Generator().manual_seed(0)  # the head's own, frequency_seed=0
    frequencies = random_frequencies(128, 1280, orthogonal=True, generator=generator)

    def logistic(support: Tensor, labels: Tensor, query: Tensor, seed: int) -> np.ndarray:
        x, q = (torch.nn.functional.normalize(a, dim=-1).numpy() for a in (support, query))
        return LogisticRegression(C=10, max_iter=1000).fit(x, labels.numpy()).predict_proba(q)

    def neighbour(support: Tensor, labels: Tensor, query: Tensor, seed: int) -> np.ndarray:
        x, q = support.numpy(), query.numpy()
        return KNeighborsClassifier(1, metric="cosine").fit(x, labels.numpy()).predict_proba(q)

    cheaper = partial(reference.dpkl, kappa_every=25, frequencies_per_step=128)
    return {
        "reference dpkl": partial(reference.dpkl, frequencies=frequencies),
        "reference dpkl, our choices": partial(cheaper, frequencies=frequencies),
        "reference dpkl, exact kernel": reference.dpkl,
        "reference dpkl, exact kernel, our choices": cheaper,
        "reference dblr": partial(reference.dpkl, embeddings=1),
        "reference cosine": reference.cosine,
        "scikit-learn logistic regression": logistic,
        "scikit-learn 1-NN": neighbour,
    }


@contextmanager
def compiler(wanted: bool) -> Iterator[None]:
    """Take training steps with the C compiler or, if it is not wanted, without."""
    os.environ["FEWSHOT_DPKL_COMPILE"] = str(int(wanted))
    compiled.forget()
    compiled.library()  # compile it now, if it never was
    yield
    del os.environ["FEWSHOT_DPKL_COMPILE"]
    compiled.forget()


class PeakMemory:
    """Megabytes of this process and its workers at their highest, shared pages counted once (Linux)."""

    def __enter__(self) -> PeakMemory:
        self.megabytes, self.done = 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(0.1):
            processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            self.megabytes = max(self.megabytes, sum(map(_proportional_megabytes, processes)))


def _proportional_megabytes(process: int | None) -> float:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # not Linux, or gone
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


def time_ours(
    head: Head, features: FeatureSet, sampler: EpisodeSampler, episodes: int
) -> tuple[float, np.ndarray]:
    """Seconds that one of our heads takes for some episodes, through `evaluate`, and its accuracies."""
    result = evaluate({"head": head}, features, sampler, episodes)["head"]
    return result.seconds, result.accuracy


def peak_memory(features: FeatureSet) -> float:
    """Megabytes of `evaluate` with DPKL, a full batch on every core; apart, because looking slows it down."""
    episodes = DPKLHead.episodes_at_once * torch.get_num_threads()
    with PeakMemory() as memory:
        evaluate({"dpkl": DPKLHead(epochs=20)}, features, EpisodeSampler(features), episodes)
    return memory.megabytes


def time_rival(
    function: Callable[..., Any], features: FeatureSet, sampler: EpisodeSampler, episodes: int
) -> tuple[float, np.ndarray]:
    """The same for a function that takes one episode at a time."""
    table = torch.as_tensor(features.features.astype(np.float32))
    drawn = sampler.draw(range(episodes))
    labels = torch.arange(sampler.way).repeat_interleave(sampler.shot)
    truth = np.arange(sampler.way).repeat(sampler.query)
    accuracy, start = [], time.perf_counter()
    for support, queries, seed in zip(drawn.support, drawn.query, drawn.seeds, strict=True):
        p = function(table[support.ravel()], labels, table[queries.ravel()], int(seed))
        accuracy.append((np.asarray(p).argmax(-1) == truth).mean())
    return time.perf_counter() - start, np.array(accuracy)


def take_turns(
    features: FeatureSet, rounds: int, episodes: int, few: int, done: Callable[[], Any]
) -> dict[str, dict[str, Any]]:
    """Seconds an episode and accuracy of all heads and rivals, over rounds of other episodes each."""
    reference.warm_up()
    turns: dict[str, list[tuple[float, np.ndarray]]] = {}
    for seed in range(rounds):
        sampler = EpisodeSampler(features, seed=seed)
        for name, make in OURS.items():
            with compiler(wanted=not name.endswith(UNCOMPILED)):
                turns.setdefault(name, []).append(time_ours(make(), features, sampler, episodes))
            done()
        for name, function in rivals().items():
            number = few if name.startswith("reference d") else min(8 * few, episodes)  # the others are fast
            turns.setdefault(name, []).append(time_rival(function, features, sampler, number))
            done()
    rows = {}
    for name, results in turns.items():
        seconds, accuracy = zip(*results, strict=True)
        total = sum(map(len, accuracy))
        mean = float(np.concatenate(accuracy).mean())
        rows[name] = {"seconds": sum(seconds) / total, "accuracy": mean, "episodes": total}
    return rows


def compare_workers(features: FeatureSet, episodes: int) -> dict[str, float]:
    """Seconds an episode of DPKL on all cores, by what the cores are given."""
    table = torch.as_tensor(features.features.astype(np.float32))
    cores = torch.get_num_threads()
    size = episodes // cores
    batches = list(EpisodeSampler(features).batches(range(episodes), size))
    work = partial(score_head, DPKLHead(), table)

    def python_threads() -> None:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(work, batches))
        torch.set_num_threads(cores)

    ways: dict[str, Callable[[], Any]] = {
        f"{cores} processes": lambda: list(on_every_core(work, batches, cores)),
        f"{cores} Python threads": python_threads,
        f"{cores} threads in each operation": lambda: list(map(work, batches)),
    }
    return {name: timed(run) / episodes for name, run in ways.items()}


def fit_seconds(batch: int, features: int, way: int, shot: int, particles: int, epochs: int) -> float:
    """Seconds an episode that DPKL takes to learn a batch of made-up episodes on one core."""
    support = torch.rand(batch, way * shot, features, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(way).repeat_interleave(shot).expand(batch, -1)
    head = DPKLHead(embeddings=particles, particles=particles, epochs=epochs)
    return timed(lambda: head.fit_episodes(support, labels, range(batch))) / batch


def sweep(what: str, value: int) -> float:
    """Seconds an episode on one core, 100 epochs (from 10), with one size changed."""
    size = {
        "features D": 1600,
        "way": 5,
        "shot": 5,
        "particles m": 10,
        "episodes in a batch": 12,
        what: value,
    }
    batch, features = size["episodes in a batch"], size["features D"]
    fit = partial(fit_seconds, batch, features, size["way"], size["shot"], size["particles m"])
    start, ten = fit(1), fit(11)
    return start + 9.9 * max(ten - start, 0.0)


def roofline() -> dict[str, float]:
    """The machine's matrix-product rate on one core, and what DPKL's training step makes of it."""
    a = torch.rand(768, 768)
    rate = max(2 * 768**3 / timed(lambda: a @ a) for _ in range(20))
    n, m, b, d, k, block = 25, 10, 5, 128, 50, 128  # 5-way 5-shot, minibatch 5, one block of frequencies
    points = m * b + k  # embedded points and class weights
    products = (
        m * b * n * d  # from gradients to the values at all support points
        + m * b * b * d  # their mean squares
        + (n * n * m * d + m * m * n * d + m * k * d) / 25  # distances between particles, once in 25 steps
        + 2 * points * d * block  # phases and back
        + 3 * b * k * 2 * block  # kernel and back, to both sides
        + m * m * b * d  # κ between layers
        + 2 * m * k * d  # κ between class weights, and their drift
    )
    sizes = (24, 400, 5, 5, 10)
    seconds = (fit_seconds(*sizes, epochs=25) - fit_seconds(*sizes, epochs=5)) / 100  # 20 epochs of 5 steps
    flops = 2 * products / seconds
    return {"peak_gflops": rate / 1e9, "dpkl_gflops": flops / 1e9, "share": flops / rate}


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def report(document: dict[str, Any]) -> str:
    rows = document["heads"]
    lines = [f"{'':<44}{'ms/episode':>12}{'accuracy %':>12}{'episodes':>10}   times our head"]
    for name, row in rows.items():
        line = f"{name:<44}{1e3 * row['seconds']:>12.1f}{100 * row['accuracy']:>12.1f}{row['episodes']:>10}"
        if name in RIVAL_OF:
            line += f"   {row['seconds'] / rows[RIVAL_OF[name]]['seconds']:.3g} × {RIVAL_OF[name]}"
        lines.append(line)
    roof = document["roofline"]
    lines.append(f"training steps of dpkl and dblr: {'compiled' if document['compiled'] else 'by torch'}")
    lines.append(f"peak memory of dpkl, workers included: {document['peak_memory_mb']:.0f} MB")
    lines.append(
        f"one core: matrix products {roof['peak_gflops']:.0f} GFLOP/s, a DPKL step "
        f"{roof['dpkl_gflops']:.1f} GFLOP/s ({100 * roof['share']:.0f} % of peak)"
    )
    lines += [f"{name}: {1e3 * seconds:.0f} ms/episode" for name, seconds in document["workers"].items()]
    return "\n".join(lines)


def draw(document: dict[str, Any], path: Path) -> None:
    """Times of all heads on the left; how DPKL's time grows, and what workers gain, on the right."""
    figure = plt.figure(figsize=(15, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 5)
    rows = sorted(document["heads"].items(), key=lambda row: row[1]["seconds"])
    bars = figure.add_subplot(grid[:, :2])
    kinds = {"reference": "#c44e52", "scikit-learn": "#8172b3", "ours": "#4c72b0"}
    for kind, colour in kinds.items():
        mine = [row for row in rows if kind_of(row[0]) == kind]
        milliseconds = [1e3 * row["seconds"] for _, row in mine]
        drawn = bars.barh([rows.index(row) for row in mine], milliseconds, color=colour, label=kind)
        labels = [f"{duration(row['seconds'])}, {100 * row['accuracy']:.1f} %" for _, row in mine]
        bars.bar_label(drawn, labels, padding=4, fontsize=8)
    bars.set_yticks(range(len(rows)), [row[0] for row in rows])
    bars.set(xscale="log", xlabel="milliseconds an episode (accuracy beside it)", title="All cores")
    bars.set_xlim(right=1000 * max(1e3 * row[1]["seconds"] for row in rows))
    bars.legend(loc="lower right", frameon=False)
    places = [grid[i, j] for i in range(2) for j in range(2, 5)]
    for place, (what, times) in zip(places, document["growth"].items(), strict=False):
        axis = figure.add_subplot(place)
        axis.plot([int(x) for x in times], [1e3 * t for t in times.values()], marker="o", color=kinds["ours"])
        axis.set(xscale="log", yscale="log", xlabel=what, ylabel="ms an episode, one core")
        axis.set_xticks([int(x) for x in times], list(map(str, times)), fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(5, 5000)
        axis.grid(alpha=0.3)
    axis = figure.add_subplot(places[5])
    workers = document["workers"]
    drawn = axis.barh([name.replace(" in", "\nin") for name in workers], [1e3 * t for t in workers.values()])
    axis.bar_label(drawn, fmt="%.0f", padding=3)
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.set(xlabel="ms an episode, all cores")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def kind_of(name: str) -> str:
    return name.split()[0] if name in RIVAL_OF else "ours"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, default=SHIPPED)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=192, help="of our heads in a round")
    parser.add_argument("--reference-episodes", type=int, default=1, help="of the reference loops in a round")
    parser.add_argument("--quick", action="store_true", help="few episodes, two points a sweep")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    features = FeatureSet.load(arguments.features)
    rounds, episodes = (1, 8) if arguments.quick else (arguments.rounds, arguments.episodes)
    growth = {what: values[:2] if arguments.quick else values for what, values in SWEEPS.items()}
    total = rounds * (len(OURS) + len(RIVAL_OF)) + sum(map(len, growth.values())) + 3
    with tqdm(total=total, disable=not sys.stderr.isatty(), leave=False) as bar:

        def done(value: Any = None) -> Any:
            bar.update()
            return value

        heads = take_turns(features, rounds, episodes, arguments.reference_episodes, done)
        memory = done(peak_memory(features))
        workers = done(compare_workers(features, 4 * torch.get_num_threads()))  # few: the last way is slow
        cores = torch.get_num_threads()
        torch.set_num_threads(1)
        times = {
            what: {value: done(sweep(what, value)) for value in values} for what, values in growth.items()
        }
        document = {
            "cores": cores,
            "compiled": compiled.library() is not None,
            "heads": heads,
            "peak_memory_mb": memory,
            "workers": workers,
            "growth": times,
            "roofline": done(roofline()),
        }
    print(report(document))
    with atomic_path(arguments.out / "bench_heads.json") as path:
        path.write_text(json.dumps(document, indent=2) + "\n")
    with atomic_path(arguments.out / "bench_heads.png") as path:
        draw(document, path)


if __name__ == "__main__":
    main()
