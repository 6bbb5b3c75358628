"""Check a download of a data set, say what is missing, and decode its pictures once."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.prepare import main

if __name__ == "__main__":
    run(main)
