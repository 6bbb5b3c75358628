"""What a training run follows: stages of picture sizes, rates, augmentation."""

from __future__ import annotations

import math
from dataclasses import dataclass

OPTIMIZERS = ("muon", "adamw", "sgd")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Stage:
    """A part of the training: `epochs` passes over the data with pictures of `size` × `size` pixels.

    The first `frozen` blocks of the backbone, which see the most pixels and settle first, learn no more.
    """

    epochs: int
    size: int
    batch_size: int
    frozen: int = 0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a training run, apart from the data.

    `optimizer` is `adamw`, `sgd`, or `muon`: Muon at `filter_lr` for the filters, AdamW at `lr` for the rest.
    `prototypes` is the weight of `prototype_loss` beside the cross-entropy; with it, four pictures of a
    class stand together in a batch. `precision` is that of the convolutions' products; weights, sums over a
    batch and the classifier keep float32.
    """

    stages: tuple[Stage, ...]
    optimizer: str = "muon"
    lr: float = 4e-3
    filter_lr: float = 0.02
    weight_decay: float = 0.05
    warmup: float = 0.2
    label_smoothing: float = 0.0
    scale: float = 10.0
    learn_scale: bool = True
    prototypes: float = 0.0
    area: tuple[float, float] = (0.35, 1.0)
    jitter: float = 0.4
    average: float = 0.998
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; choose {', '.join(OPTIMIZERS)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; choose {', '.join(PRECISIONS)}")
        if self.prototypes < 0:
            raise ValueError(f"prototypes is {self.prototypes}; expected a weight of 0 or more")
        for stage in self.stages:
            if stage.size < 16 or stage.batch_size < 2 or stage.epochs < 0 or stage.frozen < 0:
                raise ValueError(
                    f"{stage}: pictures need 16 pixels, batches 2 pictures, epochs and frozen blocks cannot "
                    "be negative"
                )

    @property
    def epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    def stage_of(self, epoch: int) -> Stage:
        """The stage that epoch 0, 1, … belongs to."""
        for stage in self.stages:
            if epoch < stage.epochs:
                return stage
            epoch -= stage.epochs
        raise ValueError("this epoch is past the end of the recipe")

    def pace(self, progress: float) -> float:
        """The share of the full rates at `progress` 0 … 1: a linear rise, then half a cosine down to zero."""
        if progress < self.warmup:
            return max(progress, 1e-3) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))
