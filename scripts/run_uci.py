"""Compare GP, DKL and DPKL, and their semi-supervised forms, on small regression sets (section 4)."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.uci import main

if __name__ == "__main__":
    run(main)
