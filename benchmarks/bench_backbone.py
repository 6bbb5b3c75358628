"""How fast Conv-4 trains and extracts, as ratios to the textbook block measured in the same run.

    python benchmarks/bench_backbone.py --threads 2

The textbook block is convolution, batch normalisation, ReLU, max-pooling in this order, NCHW layout,
batches of 64, memory as torch leaves it. Every variant has a process of its own; they are timed in turn,
several rounds of them, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewshot_dpkl.backbones import fold_batch_norm
from fewshot_dpkl.backbones.conv import conv4
from fewshot_dpkl.backbones.train import keep_memory


class TextbookBlock(nn.Module):
    def __init__(self, channels_in: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, channels_in, H, W]` to `[B, 64, H // 2, W // 2]`."""
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


def textbook() -> nn.Module:
    return nn.Sequential(*(TextbookBlock(3 if index == 0 else 64) for index in range(4)), nn.Flatten())


def folded_conv4() -> nn.Module:
    return fold_batch_norm(conv4())


def model_and_pictures(variant: Variant) -> tuple[nn.Module, Tensor]:
    layout = torch.channels_last if variant.ours else torch.contiguous_format
    images = torch.randn(variant.batch, 3, variant.size, variant.size)
    return variant.make().to(memory_format=layout), images.contiguous(memory_format=layout)


def training_step(variant: Variant) -> Callable[[], int]:
    """A function that does one forward and backward pass and returns the number of pictures."""
    model, images = model_and_pictures(variant)
    model.train()

    def step() -> int:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.half):
            features = model(images)
        features.float().square().mean().backward()
        return variant.batch

    return step


def inference_step(variant: Variant) -> Callable[[], int]:
    """A function that extracts the features of one batch and returns the number of pictures."""
    model, images = model_and_pictures(variant)
    model.eval()

    def step() -> int:
        with torch.inference_mode():
            model(images)
        return variant.batch

    return step


@dataclass(frozen=True)
class Variant:
    """What one process times: a model of `make`, training or inference, on random pictures."""

    name: str
    make: Callable[[], nn.Module]
    training: bool
    batch: int
    size: int = 84
    ours: bool = True  # the way `backbones` does it: channels-last, freed buffers kept
    half: bool = False  # products in bfloat16


step: Callable[[], int]  # of this process


def prepare(variant: Variant, threads: int) -> None:
    """Set a fresh process up for its variant."""
    global step
    torch.set_num_threads(threads)
    if variant.ours:
        keep_memory()
    step = training_step(variant) if variant.training else inference_step(variant)


def time_steps(seconds: float) -> float:
    """Images per second of this process's variant, over about `seconds`."""
    step()
    begin, images = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        images += step()
    return images / (time.perf_counter() - begin)


def images_per_second(
    variants: Sequence[Variant], threads: int, rounds: int, seconds: float
) -> dict[str, float]:
    """Best of `rounds` rounds; every round times each variant for about `seconds`, the others wait.

    Every variant has a process of its own: how memory is kept is a part of it.
    """
    context = multiprocessing.get_context("spawn")
    best = {variant.name: 0.0 for variant in variants}
    with ExitStack() as stack:
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, context, prepare, (variant, threads)))
            for variant in variants
        ]
        for _ in range(rounds):
            for variant, pool in zip(variants, pools, strict=True):
                speed = pool.submit(time_steps, seconds).result()
                best[variant.name] = max(best[variant.name], speed)
    return best


def report(title: str, speeds: dict[str, float]) -> None:
    print(title)
    reference = next(iter(speeds.values()))
    for name, speed in speeds.items():
        print(f"  {name:<48} {speed:8.1f} images/s  {speed / reference:5.2f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="per variant and round")
    arguments = parser.parse_args()
    timing = arguments.threads, arguments.rounds, arguments.seconds
    print(f"Conv-4, 84×84, {arguments.threads} threads, torch {torch.__version__}")
    training = [
        Variant("textbook block, NCHW, batch 64", textbook, True, 64, ours=False),
        Variant("this project, batch 16", conv4, True, 16),
        Variant("textbook block, bfloat16", textbook, True, 64, ours=False, half=True),
        Variant("this project, batch 32, bfloat16", conv4, True, 32, half=True),
        Variant("this project, batch 16, second stage (64 pixels)", conv4, True, 16, size=64),
        Variant("this project, batch 16, first stage (48 pixels)", conv4, True, 16, size=48),
    ]
    report("training (forward and backward)", images_per_second(training, *timing))
    inference = [
        Variant("textbook block, NCHW, batch 64", textbook, False, 64, ours=False),
        Variant("batch norm folded, channels-last, batch 32", folded_conv4, False, 32),
    ]
    report("inference", images_per_second(inference, *timing))


if __name__ == "__main__":
    main()
