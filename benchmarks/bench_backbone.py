"""How fast Conv-4 trains and extracts, as ratios to the textbook block measured in the same run.

    python benchmarks/bench_backbone.py --threads 2

The textbook block is convolution, batch normalisation, ReLU, max-pooling in this order, NCHW layout,
batches of 64. The variants are timed in turn, several rounds of them; the best round of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import build, fold_batch_norm
from backbones.train import keep_memory


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


def training_step(model: nn.Module, batch: int, size: int, channels_last: bool) -> Callable[[], int]:
    """A function that does one forward and backward pass and returns the number of pictures."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.train().to(memory_format=layout)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=layout)

    def step() -> int:
        model.zero_grad(set_to_none=True)
        model(images).square().mean().backward()
        return batch

    return step


def inference_step(model: nn.Module, batch: int, size: int, channels_last: bool) -> Callable[[], int]:
    """A function that extracts the features of one batch and returns the number of pictures."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.eval().to(memory_format=layout)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=layout)

    def step() -> int:
        with torch.inference_mode():
            model(images)
        return batch

    return step


def images_per_second(steps: dict[str, Callable[[], int]], rounds: int, seconds: float) -> dict[str, float]:
    """Best of `rounds` rounds; every round times each of `steps` for about `seconds`."""
    best = dict.fromkeys(steps, 0.0)
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            begin, images = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                images += step()
            best[name] = max(best[name], images / (time.perf_counter() - begin))
    return best


def report(title: str, speeds: dict[str, float]) -> None:
    print(title)
    reference = next(iter(speeds.values()))
    for name, speed in speeds.items():
        print(f"  {name:<48} {speed:8.1f} images/s  {speed / reference:5.2f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="per variant and round")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rounds, seconds = arguments.rounds, arguments.seconds
    keep_memory()
    print(f"Conv-4, 84×84, {arguments.threads} threads, torch {torch.__version__}")
    train_steps = {
        "textbook block, NCHW, batch 64": training_step(textbook(), 64, 84, False),
        "this project, batch 16": training_step(build("conv4"), 16, 84, True),
        "this project, batch 16, first stage (64 pixels)": training_step(build("conv4"), 16, 64, True),
    }
    report("training (forward and backward)", images_per_second(train_steps, rounds, seconds))
    folded = fold_batch_norm(build("conv4"))
    infer_steps = {
        "textbook block, NCHW, batch 64": inference_step(textbook(), 64, 84, False),
        "batch norm folded, channels-last, batch 32": inference_step(folded, 32, 84, True),
    }
    report("inference", images_per_second(infer_steps, rounds, seconds))


if __name__ == "__main__":
    main()
