"""Compare BLR, BNN, DBLR and DPKL on a few labelled digits (appendices B.2 and C.3 of the paper)."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.mnist import main

if __name__ == "__main__":
    run(main)
