"""`fewshot-dpkl COMMAND`, `python -m fewshot_dpkl COMMAND` and the scripts: one program under three names."""

import json
import subprocess
import sys

import pytest

import fewshot_dpkl
from fewshot_dpkl.__main__ import COMMANDS, main
from fewshot_dpkl.commands.cli import command_line
from tests.conftest import ROOT, assert_refused, cluster_features


def test_alone_it_shows_every_command_without_loading_torch():
    code = "import sys; from fewshot_dpkl.__main__ import main; main(); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: fewshot-dpkl COMMAND [options]")
    for name in COMMANDS:
        assert f"\n  {name} " in shown.stdout


def test_unknown_commands_are_one_sentence_and_the_version_is_the_package_s(run_command):
    assert_refused(run_command("evaluate"), "no command 'evaluate'", "choose from eval, classify")
    assert run_command("--version").stdout == f"fewshot-dpkl {fewshot_dpkl.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_explains_itself_under_its_own_name(name, run_command):
    shown = run_command(name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: fewshot-dpkl {name} ")


def test_help_names_the_module_and_the_script_too(run_program, run_script):
    module = run_program(lambda: main("python -m fewshot_dpkl"), "__main__.py", "prepare", "--help")
    assert module.stdout.startswith("usage: python -m fewshot_dpkl prepare ")
    assert run_script("prepare_data.py", "--help").stdout.startswith("usage: prepare_data.py ")


def test_what_a_run_records_starts_it_again(run_command, run_script, tmp_path):
    cluster_features().save(tmp_path / "F.npz")
    given = ["--features", str(tmp_path / "F.npz"), "--head", "nn", "--episodes", "2", "--shot", "1", "--out"]
    assert run_command("eval", *given, tmp_path / "a b").returncode == 0
    recorded = json.loads((tmp_path / "a b" / "results.json").read_text())["command"]
    assert recorded == " ".join(["fewshot-dpkl eval", *given, f"'{tmp_path}/a b'"])
    assert run_script("eval_episodes.py", *given, tmp_path / "run").returncode == 0
    recorded = json.loads((tmp_path / "run" / "results.json").read_text())["command"]
    assert recorded == " ".join([f"python {ROOT}/scripts/eval_episodes.py", *given, f"{tmp_path}/run"])


@pytest.mark.parametrize(
    ("started", "alone", "two"),
    [
        ("fewshot-dpkl eval", "fewshot-dpkl eval", "torchrun --nproc-per-node=2 -m fewshot_dpkl eval"),
        ("python -m fewshot_dpkl eval",) * 2 + ("torchrun --nproc-per-node=2 -m fewshot_dpkl eval",),
        ("s/e.py", "python s/e.py", "torchrun --nproc-per-node=2 s/e.py"),
    ],
)
def test_command_lines_under_every_launcher(monkeypatch, started, alone, two):
    monkeypatch.setattr(sys, "argv", [started, "--head", "all"])
    assert command_line() == f"{alone} --head all"
    assert command_line(2) == f"{two} --head all"


def test_bad_input_of_a_command_is_one_sentence(run_command):
    assert_refused(run_command("eval", "--features", "nowhere.npz"), "no features file at nowhere.npz")
