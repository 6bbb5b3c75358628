"""The tutorials, run as they are read; the documentation site, built strictly."""

import doctest
import importlib
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import fewshot_dpkl
from fewshot_dpkl import regression
from tests.conftest import ROOT
from tests.data.test_mnist import write_digits

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
SMALL = {  # what makes a command quick; the last of an option that is given twice counts
    "eval": ["--episodes", "2"],
    "mnist": ["--sizes", "20", "--trials", "1", "--models", "blr"],
    "uci": ["--sizes", "20", "--trials", "1", "--models", "gp", "--test", "30"],
}
NEEDS_DATA = ("prepare", "results", "train", "extract --dataset", "eval --features runs/cub-novel.npz")


def blocks(path: Path) -> list[tuple[str, str, str]]:
    """Language, file name and text of every fenced block."""
    return BLOCK.findall(path.read_text("utf-8"))


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("fewshot-dpkl ")]


def needs_data(words: list[str]) -> bool:
    given = " ".join(words)
    return any(given.startswith(need.split()[0]) and need.split(None, 1)[-1] in given for need in NEEDS_DATA)


def make_up_data(folder: Path) -> None:
    """Digits and a regression set of the names that the tutorials use."""
    write_digits(folder / "mnist")
    rng = np.random.default_rng(0)
    for name in ("skillcraft", "parkinsons", "elevators"):
        x = rng.normal(size=(80, 3))
        (folder / "uci" / name).mkdir(parents=True)
        np.save(folder / "uci" / name / "X.npy", x)
        np.save(folder / "uci" / name / "y.npy", x[:, 0] + 0.1 * rng.normal(size=80))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_from_its_first_line_to_its_last(
    path, run_command, tmp_path, monkeypatch, registered_backbones
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEWSHOT_DPKL_DATA", str(tmp_path / "data"))
    make_up_data(tmp_path / "data")
    namespace: dict[str, object] = {"__name__": "tutorial"}
    for language, name, text in blocks(path):
        if name:
            Path(name).write_text(text)
        elif language == "python":
            exec(compile(text, f"{path.name}, {text.splitlines()[0]}", "exec"), namespace)
        for words in commands(text) if language == "bash" else []:
            if needs_data(words):  # hours, or gigabytes: its arguments are read, no more
                module = importlib.import_module(f"fewshot_dpkl.commands.{words[0]}")
                monkeypatch.setattr(sys, "argv", ["fewshot-dpkl", *words[1:]])
                assert vars(module.parse())
                continue
            ran = run_command(*words, *SMALL.get(words[0], []))
            assert ran.returncode == 0, f"{words}: {ran.stderr}"
            assert ran.stdout.strip(), words


def test_the_four_tutorials_are_there_and_all_have_something_to_run():
    assert {path.stem for path in TUTORIALS} == {"own-pictures", "own-features", "own-head", "paper"}
    assert all(any(language in ("python", "bash") for language, *_ in blocks(path)) for path in TUTORIALS)


def test_commands_in_the_readme_and_the_pages_have_arguments_that_exist(monkeypatch):
    """Every `fewshot-dpkl …` line in Markdown parses."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    seen = 0
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^ *fewshot-dpkl ([a-z]+ .*?)(?: {2,}#.*| {2,}\(.*)?$", text, re.M):
            words = shlex.split(line)
            module = importlib.import_module(f"fewshot_dpkl.commands.{words[0]}")
            monkeypatch.setattr(sys, "argv", ["fewshot-dpkl", *words[1:]])
            try:
                module.parse()
            except SystemExit:
                pytest.fail(f"{page.name}: {line}")
            seen += 1
    assert seen > 20


def test_the_lines_of_python_in_the_readme_run():
    (code,) = (text for language, _, text in blocks(ROOT / "README.md") if language == "python")
    assert len(code.splitlines()) <= 11
    exec(compile(code, "README.md", "exec"), {})


PUBLIC = [f"fewshot_dpkl:{name}" for name in fewshot_dpkl.__all__ if name != "HEADS"]
PUBLIC += [f"fewshot_dpkl.regression:{name}" for name in regression.__all__]
PUBLIC += [f"fewshot_dpkl.evaluation.tables:{name}" for name in ("aligned", "markdown", "latex")]
PUBLIC += [
    f"fewshot_dpkl.evaluation.metrics:{name}" for name in ("mean_interval", "expected_calibration_error")
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name, registered_backbones, capsys):
    module, _, attribute = name.partition(":")
    thing = getattr(importlib.import_module(module), attribute)
    home = vars(importlib.import_module(thing.__module__))
    (example,) = doctest.DocTestFinder(recurse=False).find(thing, attribute, globs=dict(home))
    assert example.examples, f"{name} has no example"
    failed = doctest.DocTestRunner().run(example).failed
    assert not failed, capsys.readouterr().out


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    from mkdocs.__main__ import cli

    with pytest.raises(SystemExit) as stop:
        cli(["build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)])
    assert stop.value.code in (0, None)
    assert "predict_proba_particles" in (tmp_path / "reference" / "index.html").read_text("utf-8")
