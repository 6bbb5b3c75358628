"""The commands of the README and the pages, one after the other, with made-up data and small numbers."""

from __future__ import annotations

import os
import re
import shlex
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fewshot_dpkl.__main__ import COMMANDS
from fewshot_dpkl.commands import train
from tests.conftest import ROOT
from tests.data.test_mnist import write_digits
from tests.picture_files import make_cub, make_folder, make_mini_imagenet, picture
from tests.test_docs import SMALL

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # tutorials have a test of their own
COMMAND = re.compile(r"^ *((?:fewshot-dpkl|torchrun|python scripts/) ?.*?)(?: {2,}[#(].*)?$", re.M)
SCRIPTS = {
    "classify.py": "classify",
    "demo_app.py": "demo",
    "eval_episodes.py": "eval",
    "extract_features.py": "extract",
    "make_results.py": "results",
    "prepare_data.py": "prepare",
    "run_mnist.py": "mnist",
    "run_uci.py": "uci",
    "train_backbone.py": "train",
}
ENDS = ("fewshot-dpkl", "fewshot_dpkl", ".py")
QUICK = {
    **SMALL,
    "train": ["--epochs", "1", "--stages", "16:8:1", "--threads", "1"],
    "demo": ["--port", "0"],
}


def commands(page: Path) -> list[list[str]]:
    """The words of every command in a page, from its name on; torchrun has other tests."""
    found = []
    for line in COMMAND.findall(page.read_text("utf-8").replace("\\\n", " ")):
        words = shlex.split(line)
        start = next(
            i for i, word in enumerate(words) if word.endswith(("fewshot-dpkl", "fewshot_dpkl", ".py"))
        )
        name = words[start + 1] if not words[start].endswith(".py") else SCRIPTS.get(Path(words[start]).name)
        after = words[start + 2 :] if not words[start].endswith(".py") else words[start + 1 :]
        if name in COMMANDS:  # not `fewshot-dpkl --help`, nor a script that is no command
            found.append([name, *map(os.path.expanduser, after)])
    return found


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A home and a data root with small pictures and arrays under the names that the pages use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEWSHOT_DPKL_DATA", str(tmp_path / "data"))
    make_mini_imagenet(tmp_path / "data" / "mini-imagenet")
    make_mini_imagenet(tmp_path / "Downloads" / "mini-imagenet", per_class=1)
    make_cub(tmp_path / "data" / "cub", per_class=1)
    write_digits(tmp_path / "data" / "mnist")
    rng = np.random.default_rng(0)
    for name in ("skillcraft", "parkinsons", "elevators", "pol", "gas"):
        (tmp_path / "data" / "uci" / name).mkdir(parents=True)
        np.save(tmp_path / "data" / "uci" / name / "X.npy", x := rng.normal(size=(80, 3)))
        np.save(tmp_path / "data" / "uci" / name / "y.npy", x[:, 0])
    make_folder(tmp_path, {"birds": 3, "new": 2, "DIR": 2}, per_class=3)
    (tmp_path / "photo.jpg").write_bytes(picture(1))
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    # twenty pictures of every class would take their time
    monkeypatch.setattr(train, "make_validate", lambda *arguments: lambda backbone: {"1-nn": 50.0})


@pytest.mark.usefixtures("made_up", "registered_backbones")
def test_the_commands_of_the_pages_run_one_after_the_other(run_command, monkeypatch):
    ran = 0
    for page in PAGES:
        for name, *words in commands(page):
            # its weights would have to be downloaded
            words = [word.replace("torchvision:resnet18", "conv4-cub") for word in words]
            if name == "train" and Path(words[words.index("--out") + 1]).exists():
                words.append("--overwrite")
            result = run_command(name, *words, *QUICK.get(name, []))
            assert result.returncode == 0, f"{page.name}: {name} {shlex.join(words)}: {result.stderr}"
            ran += 1
    assert ran >= 15
