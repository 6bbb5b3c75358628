"""Train a backbone on the base classes of a data set and write its weights with a card."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.train import main

if __name__ == "__main__":
    run(main)
