"""Classify pictures of your own from a few examples per class."""

from fewshot_dpkl.commands.classify import main
from fewshot_dpkl.commands.cli import run

if __name__ == "__main__":
    run(main)
