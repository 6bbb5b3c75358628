"""Fix the lengthscale of a backbone's features on validation classes and keep it in its card."""

from fewshot_dpkl.commands.cli import run
from fewshot_dpkl.commands.fit_lengthscale import main

if __name__ == "__main__":
    run(main)
