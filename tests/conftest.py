"""What the tests share: synthetic features, real features where they are, and the script runner."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
import torch

from fewshot_dpkl import FeatureSet
from fewshot_dpkl.__main__ import main

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _few_threads():
    """Results must not depend on it; small tensors are fastest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cluster_features(classes=8, per_class=30, dimension=40, spread=0.6, seed=0) -> FeatureSet:
    """Classes as noisy non-negative directions, as a ReLU backbone would give."""
    rng = np.random.default_rng(seed)
    centres = rng.exponential(size=(classes, dimension))
    labels = np.repeat(np.arange(classes), per_class)
    features = np.abs(centres[labels] + spread * rng.normal(size=(len(labels), dimension)))
    return FeatureSet(
        features.astype(np.float32), labels, [f"class {c}" for c in range(classes)], {"made": "up"}
    )


@pytest.fixture
def clusters() -> FeatureSet:
    return cluster_features()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data, or a skip that says how to get one."""
    root = os.environ.get("FEWSHOT_DPKL_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip(
            "needs real data: set FEWSHOT_DPKL_DATA to a folder with mini-imagenet/, cub/, mnist/, uci/"
        )
    return Path(root)


@pytest.fixture
def registered_backbones(monkeypatch):
    """Backbones found by name as after `pip install`, whether or not this checkout is the installed one."""
    group = "fewshot_dpkl.backbones"
    names = ("default", "torchvision", "timm")
    points = EntryPoints(EntryPoint(name, "fewshot_dpkl.backbones:load_backbone", group) for name in names)
    monkeypatch.setattr(
        "fewshot_dpkl.pictures.embedding.entry_points", lambda group: points.select(group=group)
    )


@dataclass
class Ran:
    """What a script left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_program(capfd, monkeypatch) -> Callable[..., Ran]:
    """Call a program with arguments as the shell would, but inside this process: importing torch is slow."""

    def run(start: Callable[[], object], name: str, *arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        threads = torch.get_num_threads()
        capfd.readouterr()
        try:
            start()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            torch.set_num_threads(threads)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture
def run_script(run_program) -> Callable[..., Ran]:
    """Run scripts/NAME."""

    def run(name: str, *arguments: object) -> Ran:
        path = str(ROOT / "scripts" / name)
        return run_program(lambda: runpy.run_path(path, run_name="__main__"), name, *arguments)

    return run


@pytest.fixture
def run_command(run_program) -> Callable[..., Ran]:
    """Run `fewshot-dpkl NAME`."""
    return lambda *arguments: run_program(main, "/somewhere/bin/fewshot-dpkl", *arguments)


def assert_refused(result: Ran, *words: str) -> None:
    """One sentence on standard error, exit status 2, no traceback."""
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
