"""Training steps in C (steps.c), compiled once by the C compiler of the machine, if it has one.

A step is some sixty operations on tensors of a few kilobytes: torch spends more time on calling them, and on
fetching what has left the cache between two of them, than on the numbers. Without a compiler, on other
devices and for other models torch takes the steps; `FEWSHOT_DPKL_COMPILE=0` asks for that. The results are
the same up to float rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fewshot_dpkl.files import atomic_path, user_cache
from fewshot_dpkl.heads.training.layers import EPSILON, MOMENTUM, SECOND, Adam, Descent, Points, SpanLayers
from fewshot_dpkl.heads.training.similarity import ExactKernel, FourierKernel, Similarity

if TYPE_CHECKING:
    from fewshot_dpkl.heads.training.particle import Mixing

SOURCE = Path(__file__).with_name("steps.c")
FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PROCESSOR = (("-march=native", "-mprefer-vector-width=512"), ("-mcpu=native",))  # x86; others
WIDTH = 16  # steps.c asks for widths that are multiples of it
FIELDS = {  # of `Job` in steps.c, in its order
    "episodes points layers width particles classes batch epochs": ctypes.c_int64,
    "frequencies blocks first until": ctypes.c_int64,
    "learning_rate momentum second epsilon precision floor": ctypes.c_double,
    "labels orders kernel mean_squares kappa scores drift rows columns": ctypes.c_void_p,
    "values direction square theta theta_mean theta_square": ctypes.c_void_p,  # what training moves
}


class Job(ctypes.Structure):
    _fields_ = [(name, kind) for names, kind in FIELDS.items() for name in names.split()]  # type: ignore[misc]


@cache
def run_steps() -> Any:
    """The function of that name in steps.c, or None if it cannot be compiled here."""
    if os.environ.get("FEWSHOT_DPKL_COMPILE") == "0":
        return None
    compiler = shlex.split(os.environ.get("CC", "cc"))
    for processor in PROCESSOR:
        try:
            # The macros that a compiler knows tell its version and the instructions of this processor.
            macros = _output([*compiler, *processor, "-dM", "-E", "-x", "c", os.devnull])
            key = hashlib.sha256(macros + SOURCE.read_bytes() + " ".join((*FLAGS, *processor)).encode())
            path = user_cache() / "compiled" / f"steps-{key.hexdigest()[:16]}.so"
            if not path.exists():
                with atomic_path(path) as temporary:
                    _output([*compiler, *FLAGS, *processor, "-o", str(temporary), str(SOURCE), "-lm"])
            return ctypes.CDLL(str(path)).run_steps
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


def _output(command: Sequence[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout


def compiled_steps(
    layers: Points | SpanLayers,
    labels: Tensor,
    theta: Tensor,
    move_classes: Adam | Descent,
    of_steps: Sequence[Similarity],
    orders: Tensor,
    batch_size: int,
) -> CompiledSteps | None:
    """What takes the steps of `particle.train`, which is given the same, or None if steps.c cannot."""
    if not isinstance(layers, SpanLayers) or not layers.adam or not isinstance(move_classes, Adam):
        return None
    if theta.device.type != "cpu" or theta.dtype != torch.float32 or theta.shape[-1] % WIDTH:
        return None
    blocks = [kernel for kernel in of_steps if isinstance(kernel, FourierKernel)]
    number = len(blocks[0].frequencies) if blocks else 0
    if number % WIDTH or any(len(block.frequencies) != number for block in blocks):
        return None
    if not blocks and not (isinstance(of_steps[0], ExactKernel) and of_steps[0].bounded):
        return None
    if run_steps() is None:
        return None
    return CompiledSteps(layers, labels, theta, move_classes, of_steps, orders, batch_size)


class CompiledSteps:
    """Takes the steps of `particle.train` as `particle.Steps` does."""

    def __init__(
        self,
        layers: SpanLayers,
        labels: Tensor,
        theta: Tensor,
        move_classes: Adam,
        of_steps: Sequence[Similarity],
        orders: Tensor,
        batch_size: int,
    ) -> None:
        particles, classes, width = theta.shape[1:]
        episodes, n, m, _ = layers.values.shape
        self.tensors: dict[str, Tensor] = {}
        self.job = Job(
            episodes=episodes, points=n, layers=m, width=width, particles=particles, classes=classes,
            batch=batch_size, epochs=orders.shape[1], blocks=len(of_steps), floor=FourierKernel.FLOOR,
            learning_rate=layers.learning_rate, momentum=MOMENTUM, second=SECOND, epsilon=EPSILON,
        )  # fmt: skip
        self._read(
            labels=labels.long(), orders=orders.long(), kernel=layers.kernel, mean_squares=layers.mean_squares
        )
        blocks = [kernel for kernel in of_steps if isinstance(kernel, FourierKernel)]
        if blocks:
            self.job.frequencies = len(blocks[0].frequencies)
            self._read(rows=torch.cat([block.frequencies for block in blocks]))
            self._read(columns=torch.cat([block.columns for block in blocks]))
        elif isinstance(of_steps[0], ExactKernel):
            self.job.precision = of_steps[0].precision
        self._move(values=layers.values, direction=layers.direction, square=layers.square)
        self._move(theta=theta, theta_mean=move_classes.mean, theta_square=move_classes.square)

    def __call__(self, first: int, until: int, mixing: Mixing) -> None:
        self.job.first, self.job.until = first, until
        assert mixing.layers is not None
        self._read(kappa=mixing.layers, scores=mixing.scores, drift=mixing.drift)
        if run_steps()(ctypes.byref(self.job)):
            raise MemoryError("there is no memory for a training step; train fewer episodes at once")

    def _read(self, **tensors: Tensor) -> None:
        """Let the job read from these tensors, or copies of them."""
        self._move(**{name: tensor.contiguous() for name, tensor in tensors.items()})

    def _move(self, **tensors: Tensor) -> None:
        """Let the job work on these very tensors; they live as long as this object."""
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            self.tensors[name] = tensor
            setattr(self.job, name, tensor.data_ptr())
