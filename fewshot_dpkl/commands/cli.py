"""What every entry point shares: one-sentence errors, exit status 2, `--device` and `--threads`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch


def run(main: Callable[[], None]) -> None:
    """Run `main`; bad input (ValueError, OSError) becomes one sentence and exit status 2.

    Set FEWSHOT_DPKL_DEBUG=1 to see the traceback instead.
    """
    try:
        main()
    except (ValueError, OSError) as error:
        if os.environ.get("FEWSHOT_DPKL_DEBUG"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores)")


def use_device(arguments: argparse.Namespace) -> torch.device:
    """Apply `--threads` and turn `--device` into a device that exists here."""
    if arguments.threads < 0:
        raise ValueError(f"--threads is {arguments.threads}; give a positive number, or 0 for all cores")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(arguments.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ValueError(
            f"device {arguments.device!r} is not available here; use --device auto or cpu"
        ) from None
    return device
