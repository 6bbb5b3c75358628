"""Turn pictures into a features file with a frozen backbone."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.extract import main

if __name__ == "__main__":
    run(main)
