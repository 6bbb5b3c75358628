"""How fast the heads are, as ratios measured in one run on the same episodes.

    python benchmarks/bench_heads.py --out runs/bench          about 10 minutes
    python benchmarks/bench_heads.py --rounds 1 --no-growth    about 5 minutes
    python benchmarks/bench_heads.py --quick                   does it run? its ratios say little

Times (a) reference loops, one episode at a time in plain PyTorch (benchmarks/reference.py): the paper's
algorithm as it stands, and with the choices of our heads that make a step cheaper (κ every 25 steps, a block
of frequencies in each); (b) our heads, DPKL also as on a machine without a C compiler; (c) what a user would
pick instead: scikit-learn's logistic regression and nearest neighbour, episode by episode. All take turns in
several rounds, so that a machine that is slow for a while is slow for all, and every rival runs with the
number of threads (BLAS and torch) that is its fastest, one or all, found out first. Then memory, what threads
gain, and how the time of DPKL grows with each size. Writes bench_heads.json and .png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor
from tqdm import tqdm

from benchmarks import reference
from benchmarks.heads_figure import draw
from fewshot_dpkl import HEADS, DPKLHead, EpisodeSampler, FeatureSet, Head, evaluate, make_head
from fewshot_dpkl.evaluation.evaluator import score_head
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads.training import compiled
from fewshot_dpkl.heads.training.similarity import FourierKernel
from fewshot_dpkl.parallel import on_every_core

OURS: dict[str, Callable[[], Head]] = {
    "dpkl": DPKLHead,
    "dpkl, exact kernel": partial(DPKLHead, kernel="exact"),
    **{name: partial(make_head, name) for name in HEADS if name not in ("dpkl", "bnn")},
}
FAST = ("dblr", "blr", "nn", "centroid", "cosine", "logreg")  # a few milliseconds: more episodes
UNCOMPILED = ", no compiler"  # behind the names of heads
OURS |= {name + UNCOMPILED: OURS[name] for name in ("dpkl", "dpkl, exact kernel", "dblr", "blr")}
LOGISTIC = "scikit-learn logistic regression"
COMPARED = [  # rival and head: how many times the rival's time is the head's
    ("reference dpkl", "dpkl"),
    ("reference dpkl, our choices", "dpkl"),
    ("reference dpkl, exact kernel", "dpkl, exact kernel"),
    ("reference dpkl, exact kernel, our choices", "dpkl, exact kernel"),
    ("reference dblr", "dblr"),
    ("reference blr", "blr"),
    ("reference cosine", "cosine"),
    *(
        (LOGISTIC, head)
        for head in ("dpkl", "dpkl, exact kernel", "dblr", "blr", "dpkl-calibrated", "logreg")
    ),
    ("scikit-learn 1-NN", "nn"),
]
SWEEPS: dict[str, list[int]] = {
    "episodes in a batch": [1, 4, 12, 24, 48],
    "features D": [100, 400, 1600, 3200],
    "particles m": [1, 5, 10, 20],
    "way": [2, 5, 10, 20],
    "shot": [1, 5, 10, 20],  # in 5-way tasks: n = 5 to 100 support points
}


def own_frequencies() -> Tensor:
    """Those of our DPKL, `[R, d]`."""
    kernel = DPKLHead()._similarity(torch.zeros(()))
    assert isinstance(kernel, FourierKernel)
    return kernel.frequencies


def rivals() -> dict[str, Callable[..., np.ndarray | Tensor]]:
    """name → function(support, labels, query, seed) → class probabilities or predictions `[q, C]`."""
    frequencies = own_frequencies()

    def logistic(support: Tensor, labels: Tensor, query: Tensor, seed: int) -> np.ndarray:
        x, q = (torch.nn.functional.normalize(a, dim=-1).numpy() for a in (support, query))
        return LogisticRegression(C=10, max_iter=1000).fit(x, labels.numpy()).predict_proba(q)

    def neighbour(support: Tensor, labels: Tensor, query: Tensor, seed: int) -> np.ndarray:
        x, q = support.numpy(), query.numpy()
        return KNeighborsClassifier(1, metric="cosine").fit(x, labels.numpy()).predict_proba(q)

    cheaper = partial(reference.dpkl, kappa_every=25, frequencies_per_step=128)
    return {  # the fast ones first, right after the heads that they are compared with
        LOGISTIC: logistic,
        "scikit-learn 1-NN": neighbour,
        "reference cosine": reference.cosine,
        "reference dpkl": partial(reference.dpkl, frequencies=frequencies),
        "reference dpkl, our choices": partial(cheaper, frequencies=frequencies),
        "reference dpkl, exact kernel": reference.dpkl,
        "reference dpkl, exact kernel, our choices": cheaper,
        "reference dblr": partial(reference.dpkl, embeddings=1),
        "reference blr": reference.blr,
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


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Of torch and of every BLAS."""
    before = torch.get_num_threads()
    with threadpool_limits(number):
        torch.set_num_threads(number)
        yield
    torch.set_num_threads(before)


def peak_memory(path: Path, cores: int) -> float:
    """Megabytes at the highest of a process that evaluates all heads, with full batches on every core."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_evaluate_all, (path, cores))


def _evaluate_all(path: Path, cores: int) -> float:
    torch.set_num_threads(cores)
    features = FeatureSet.load(path)
    heads = {name: make_head(name) for name in HEADS if name != "bnn"}
    episodes = cores * max(head.episodes_at_once for head in heads.values())
    evaluate(heads, features, EpisodeSampler(features), episodes)
    return high_water()


def high_water() -> float:
    """Megabytes of this process at their highest; on Linux `ru_maxrss` begins with those of its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def time_ours(
    head: Head, features: FeatureSet, sampler: EpisodeSampler, episodes: int
) -> tuple[float, np.ndarray]:
    """Seconds that one of our heads takes for some episodes, through `evaluate`, and its accuracies."""
    result = evaluate({"head": head}, features, sampler, episodes)["head"]
    return result.seconds, result.accuracy


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
    fastest: dict[str, int] = {}  # threads of a rival
    for seed in range(rounds):
        sampler = EpisodeSampler(features, seed=seed)
        for name, make in OURS.items():
            slow = name.endswith(UNCOMPILED)
            with compiler(wanted=not slow):
                number = min(8 * torch.get_num_threads(), episodes) if slow else episodes
                number *= 3 if name in FAST else 1
                turns.setdefault(name, []).append(time_ours(make(), features, sampler, number))
            done()
        for name, function in rivals().items():
            number = episodes if name.startswith("scikit-learn") else min(8 * few, episodes)
            number = few if name.startswith("reference d") else number  # a minute each
            run = partial(time_rival, function, features, sampler)
            if name not in fastest:
                short = partial(function, epochs=2) if name.startswith("reference") else function
                trial = partial(time_rival, short, features, sampler)
                fastest[name] = fastest_threads(trial, min(16, number))
            turns.setdefault(name, []).append(_with_threads(fastest[name], run, number))
            done()
    rows = {}
    for name, results in turns.items():
        seconds, accuracy = zip(*results, strict=True)
        total = sum(map(len, accuracy))
        mean = float(np.concatenate(accuracy).mean())
        rows[name] = {"seconds": sum(seconds) / total, "accuracy": mean, "episodes": total}
        rows[name]["threads"] = fastest.get(name, torch.get_num_threads())
    return rows


def fastest_threads(run: Callable[[int], tuple[float, Any]], episodes: int) -> int:
    """One thread or all of them, whichever takes less time in the best of five trials, taken in turns."""
    settings = sorted({1, torch.get_num_threads()})
    trials = [[_with_threads(number, run, episodes)[0] for number in settings] for _ in range(5)]
    return settings[int(np.min(trials, 0).argmin())]


def _with_threads(number: int, run: Callable[[int], Any], episodes: int) -> Any:
    with threads(number):
        return run(episodes)


def compare_workers(features: FeatureSet, episodes: int) -> dict[str, float]:
    """Seconds an episode of DPKL, by what the cores are given."""
    table = torch.as_tensor(features.features.astype(np.float32))
    cores = torch.get_num_threads()
    batches = list(EpisodeSampler(features).batches(range(episodes), episodes // cores))
    work = partial(score_head, DPKLHead(), table)
    ways: dict[str, Callable[[], Any]] = {
        "1 thread": lambda: list(on_every_core(work, batches, 1)),
        f"{cores} threads": lambda: list(on_every_core(work, batches, cores)),
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


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def report(document: dict[str, Any]) -> str:
    rows = document["heads"]
    lines = [f"{'':<44}{'ms/episode':>12}{'threads':>9}{'accuracy %':>12}{'episodes':>10}"]
    for name, row in rows.items():
        lines.append(
            f"{name:<44}{1e3 * row['seconds']:>12.2f}{row['threads']:>9}{100 * row['accuracy']:>12.1f}"
            f"{row['episodes']:>10}"
        )
    lines.append("")
    for rival, head in COMPARED:
        times = rows[rival]["seconds"] / rows[head]["seconds"]
        lines.append(
            f"{head:<22}{1 / times:>8.3f} times the time of {rival}, which takes {times:.3g} times its"
        )
    lines.append(f"steps and answers: {'compiled' if document['compiled'] else 'by torch'}")
    lines.append(f"peak memory of all heads in one process: {document['peak_memory_mb']:.0f} MB")
    lines += [
        f"dpkl, {name}: {1e3 * seconds:.1f} ms/episode" for name, seconds in document["workers"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, default=SHIPPED)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=192, help="of our heads in a round")
    parser.add_argument("--reference-episodes", type=int, default=1, help="of the reference loops in a round")
    parser.add_argument("--no-growth", action="store_true", help="leave out how the time grows with sizes")
    parser.add_argument("--quick", action="store_true", help="few episodes, two points a sweep")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    features = FeatureSet.load(arguments.features)
    rounds, episodes = (1, 8) if arguments.quick else (arguments.rounds, arguments.episodes)
    growth = {what: values[:2] if arguments.quick else values for what, values in SWEEPS.items()}
    growth = {} if arguments.no_growth else growth
    total = rounds * (len(OURS) + len(rivals())) + sum(map(len, growth.values())) + 2
    with tqdm(total=total, disable=not sys.stderr.isatty(), leave=False) as bar:

        def done(value: Any = None) -> Any:
            bar.update()
            return value

        heads = take_turns(features, rounds, episodes, arguments.reference_episodes, done)
        memory = done(peak_memory(arguments.features, torch.get_num_threads()))
        workers = done(compare_workers(features, 8 * torch.get_num_threads() if arguments.quick else 96))
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
        }
    print(report(document))
    with atomic_path(arguments.out / "bench_heads.json") as path:
        path.write_text(json.dumps(document, indent=2) + "\n")
    with atomic_path(arguments.out / "bench_heads.png") as path:
        draw(document, path)


if __name__ == "__main__":
    main()
