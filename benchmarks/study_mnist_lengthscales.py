"""Which lengthscales `dpkl-lengthscale` should choose from, judged on training digits alone.

    python benchmarks/study_mnist_lengthscales.py

2,000 of the 60,000 training digits are set aside to judge by; trials are drawn from the others with a seed of
their own (1000). Prints mean NLL and error on the digits set aside for every 1/ℓ² (closed-form kernel). The
test digits are not looked at.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from fewshot_dpkl.data.mnist import read_mnist, split_digits
from fewshot_dpkl.experiments.mnist.models import BATCH, LATENT, fit_trials, score
from fewshot_dpkl.experiments.mnist.sweep import trial_seed
from fewshot_dpkl.heads.dpkl import DPKLHead

SEED, ASIDE = 1000, 2000
PRECISIONS = (1, 2, 5, 10, 20, 50, 100)
TRIALS = {100: 3, 300: 2}  # by size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, help="folder that holds mnist/ or MNIST/raw/")
    digits = read_mnist(parser.parse_args().data_root)
    order = np.random.default_rng(SEED).permutation(len(digits.labels))
    aside, rest = order[:ASIDE], order[ASIDE:]

    def tensors(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.as_tensor(digits.images[rows]).float() / 255, torch.as_tensor(digits.labels[rows])

    print(f"{'n':>5}{'trials':>8}{'1/l^2':>8}{'NLL':>8}{'error %':>9}")
    for size, trials in TRIALS.items():
        split = split_digits(digits.labels[rest], size, trials, SEED)
        training, validation = (tensors(rest[rows]) for rows in (split.training, split.validation))
        seeds = [trial_seed(SEED, trial) for trial in range(trials)]
        for precision in PRECISIONS:
            head = DPKLHead(
                kernel="exact", lengthscale=precision**-0.5, latent=LATENT, batch_size=BATCH, span=False
            )
            error, nll = score(fit_trials([head], training, validation, seeds), *tensors(aside))
            print(f"{size:>5}{trials:>8}{precision:>8}{nll.mean():>8.2f}{error.mean():>9.1f}", flush=True)


if __name__ == "__main__":
    main()
