"""A page on this machine: drop pictures into classes, drop pictures to classify, see probabilities."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.demo import main

if __name__ == "__main__":
    run(main)
