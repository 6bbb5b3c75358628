"""How fast one DPKL trial on MNIST is, beside a plain loop of the same model in the same run.

    python benchmarks/bench_mnist.py --out runs/bench
    python benchmarks/bench_mnist.py --epochs 100 --trials 10

(a) the reference loop (benchmarks/reference.py): one trial at a time, a Python loop over the particles,
autograd; (b) our head with one trial; (c) with all trials in one batch; (d) with the closed-form kernel. All
train on the same digits from the same seeds, on one thread. Writes bench_mnist.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import reference
from fewshot_dpkl.data.mnist import read_mnist, split_digits
from fewshot_dpkl.experiments.mnist.models import BATCH, FREQUENCIES, LATENT
from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.heads.dpkl import DPKLHead
from fewshot_dpkl.kernels import random_frequencies

TEST = 1000  # digits to judge by


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=100, help="labelled digits (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=10, help="trials in a batch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="of every model; the paper has 100")
    parser.add_argument("--data-root", type=Path, help="folder that holds mnist/ or MNIST/raw/")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    digits = read_mnist(arguments.data_root)
    rows = split_digits(digits.labels, arguments.size, arguments.trials).training
    x, y = torch.as_tensor(digits.images[rows]).float() / 255, torch.as_tensor(digits.labels[rows])
    query = torch.as_tensor(digits.test_images[:TEST]).float() / 255
    truth = torch.as_tensor(digits.test_labels[:TEST])
    settings: dict[str, Any] = {"latent": LATENT, "batch_size": BATCH, "epochs": arguments.epochs}

    def loop(trials: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        frequencies = random_frequencies(LATENT, FREQUENCIES, orthogonal=True, generator=generator)
        return torch.stack(
            [reference.dpkl(x[t], y[t], query, t, frequencies=frequencies, **settings) for t in range(trials)]
        )

    def ours(trials: int, head: DPKLHead) -> Tensor:
        state = head.fit_episodes(x[:trials], y[:trials], range(trials))
        return head.log_proba_episodes(state, query.expand(trials, -1, -1)).exp()

    dpkl = DPKLHead(frequencies=FREQUENCIES, rotation="uniform", span=False, **settings)
    exact = DPKLHead(kernel="exact", span=False, **settings)
    measured: dict[str, tuple[int, Callable[[int], Tensor]]] = {
        "plain loop": (1, loop),
        "ours, one trial": (1, partial(ours, head=dpkl)),
        "ours, all trials in a batch": (arguments.trials, partial(ours, head=dpkl)),
        "ours, closed-form kernel": (arguments.trials, partial(ours, head=exact)),
    }
    document: dict[str, Any] = {"size": arguments.size, "epochs": arguments.epochs, "rows": {}}
    print(f"{'':<30}{'trials':>8}{'CPU s/trial':>13}{'accuracy %':>12}{'loop / this':>13}")
    for name, (trials, function) in measured.items():
        started = time.process_time()
        p = function(trials)
        seconds = (time.process_time() - started) / trials
        accuracy = 100 * float((p.argmax(-1) == truth).double().mean())
        document["rows"][name] = {"trials": trials, "cpu_seconds": seconds, "accuracy": accuracy}
        ratio = document["rows"]["plain loop"]["cpu_seconds"] / seconds
        print(f"{name:<30}{trials:>8}{seconds:>13.3f}{accuracy:>12.1f}{ratio:>13.1f}", flush=True)
    document["versions"] = {"torch": torch.__version__, "numpy": np.__version__}
    with atomic_path(arguments.out / "bench_mnist.json") as temporary:
        temporary.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
