"""Print the tables and figures of RESULTS.md: every head, mini-ImageNet, CUB, and from one to the other."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.results import main

if __name__ == "__main__":
    run(main)
