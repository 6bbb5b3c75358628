"""What every command shares: its parser, one-sentence errors, exit status 2, `--device` and `--threads`.

A command reads `sys.argv`. Its first entry is how the command was started: `fewshot-dpkl eval`,
`python -m fewshot_dpkl eval` or the path of a script.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    import torch

NAMED = 20  # of what was passed over, line by line; the rest is counted


def run(main: Callable[[], None]) -> None:
    """Run `main`; bad input (ValueError, OSError) becomes one sentence and exit status 2.

    A reader that goes away (`… | head`) stops nothing: the work goes on and is written.
    Set FEWSHOT_DPKL_DEBUG=1 to see the traceback instead.
    """
    out, err = cast(TextIO, Unbreakable(sys.stdout)), cast(TextIO, Unbreakable(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
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
        finally:
            out.flush()
            err.flush()


class Unbreakable:
    """A text stream that goes on to nowhere once nobody reads it any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        # what is still in the buffer has to go somewhere, at the latest when Python ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def say_passed_over(reasons: Iterable[tuple[str, str]]) -> None:
    """Name each thing (a file, say) that is left out, with why; a long list ends with how many more."""
    reasons = list(reasons)
    for name, reason in reasons[:NAMED]:
        print(f"passed over {name}: {reason}", file=sys.stderr)
    if len(reasons) > NAMED:
        more = [name for name, _ in reasons[NAMED:]]
        print(f"passed over {len(more)} more, from {more[0]} to {more[-1]}", file=sys.stderr)


def hint(sentence: str) -> None:
    """One line of what to try, beside the results."""
    print(f"hint: {sentence}", file=sys.stderr)


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that is named as the command was started, and shows its description as it is written."""
    name = sys.argv[0] if is_command() else os.path.basename(sys.argv[0])
    return argparse.ArgumentParser(
        name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def is_command() -> bool:
    """Whether this process was started by `fewshot-dpkl` and not as a script."""
    return sys.argv[0].startswith(("fewshot-dpkl ", "python -m fewshot_dpkl "))


def command_line(processes: int = 1) -> str:
    """The line that starts this run again; `processes` are those of torchrun."""
    program = sys.argv[0].split() if is_command() else ["python", sys.argv[0]]
    if processes > 1:
        program = ["-m", "fewshot_dpkl", program[-1]] if is_command() else program[1:]
        program = ["torchrun", f"--nproc-per-node={processes}", *program]
    return shlex.join([*program, *sys.argv[1:]])


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores)")


def use_device(arguments: argparse.Namespace) -> torch.device:
    """Apply `--threads` and turn `--device` into a device that exists here."""
    import torch  # here, so that `fewshot-dpkl --help` need not wait for it

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
