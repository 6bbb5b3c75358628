"""The wheel, away from the checkout: what is in it, and that its commands need nothing else."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of this checkout, unpacked as pip does it."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    zipfile.ZipFile(path).extractall(folder / "site")
    return folder / "site"


def test_nothing_but_the_package_lands_in_site_packages(installed):
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fewshot_dpkl"}
    (about,) = installed.glob("*.dist-info")
    assert "fewshot-dpkl = fewshot_dpkl.__main__:main" in (about / "entry_points.txt").read_text()
    inside = installed / "fewshot_dpkl"
    files = ["py.typed", "pictures/page/page.html", "evaluation/report/style.css", "data/mnist.py"]
    files += ["heads/training/steps.c", "assets/mini-imagenet-novel-conv4.npz"]
    files += [f"backbones/weights/conv4-{name}.safetensors" for name in ("cub", "mini-imagenet")]
    for file in files:
        assert (inside / file).is_file(), file


def test_its_commands_do_without_the_checkout(installed, tmp_path):
    code = (
        "import sys; checkout = sys.argv.pop(1); sys.path = [e for e in sys.path if e != checkout]\n"
        "import fewshot_dpkl.data, fewshot_dpkl.backbones; from fewshot_dpkl.__main__ import main\n"
        "print(fewshot_dpkl.__file__, fewshot_dpkl.backbones.load_backbone('conv4-cub').name)\n"
        "main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    arguments = ["eval", "--head", "nn", "--episodes", "3", "--out", "run", "--report", "run/page.html"]
    ran = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{installed}/fewshot_dpkl/__init__.py conv4-cub\n")
    assert (tmp_path / "run" / "results.json").is_file()
    assert "<title>5-way 5-shot evaluation</title>" in (tmp_path / "run" / "page.html").read_text()
