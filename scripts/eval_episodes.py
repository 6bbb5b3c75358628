"""Evaluate few-shot heads on frozen features, all on the same episodes."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.eval import main

if __name__ == "__main__":
    run(main)
