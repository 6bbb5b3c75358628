"""`fewshot-dpkl COMMAND` and `python -m fewshot_dpkl COMMAND`."""

from __future__ import annotations

import sys
from importlib import import_module

from fewshot_dpkl import __version__
from fewshot_dpkl.commands.cli import run

COMMANDS = {  # each a module of fewshot_dpkl.commands
    "eval": "evaluate heads on features, all on the same episodes",
    "classify": "classify pictures of your own from a few examples per class",
    "demo": "the same as a page on this machine",
    "extract": "turn pictures into a features file with a frozen backbone",
    "train": "train a backbone on the base classes of a data set",
    "prepare": "check a download of a data set and decode its pictures once",
    "mnist": "the paper's digits: BLR, BNN, DBLR and DPKL",
    "uci": "the paper's regression: GP, DKL, DPKL and their semi-supervised forms",
    "results": "every head on mini-ImageNet and CUB: the tables of RESULTS.md",
    "info": "what runs here: versions, threads, the compiled steps",
}


def usage(program: str) -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {about}" for name, about in COMMANDS.items())
    return (
        f"usage: {program} COMMAND [options]\n\nFew-shot learning on frozen features.\n\n{lines}\n\n"
        f"{program} COMMAND --help says more."
    )


def main(program: str = "fewshot-dpkl") -> None:
    """Start the command that `sys.argv` names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(usage(program))
    elif name == "--version":
        print(f"fewshot-dpkl {__version__}")
    elif name in COMMANDS:
        sys.argv = [f"{program} {name}", *sys.argv[2:]]
        run(lambda: import_module(f"fewshot_dpkl.commands.{name}").main())
    else:
        print(f"error: there is no command {name!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main("python -m fewshot_dpkl")
