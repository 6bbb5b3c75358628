"""What every command shares: results are on disk before they are shown, a reader may go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fewshot_dpkl.commands import classify, cli, eval
from tests.conftest import ROOT
from tests.picture_files import make_folder


@pytest.fixture
def closed_pipe(monkeypatch):
    """Standard output whose reader has gone, as that of `… | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield
        stream.flush()  # what Python does at its end; it must find the buffer gone to nowhere


def test_work_goes_on_when_nobody_reads(closed_pipe, tmp_path):
    def main():
        print("a line", flush=True)
        print("x" * 10**6)
        (tmp_path / "result").touch()

    cli.run(main)
    assert (tmp_path / "result").exists()


def test_an_error_is_still_one_without_a_reader(closed_pipe):
    def main():
        print("a line", flush=True)
        raise ValueError("this went wrong")

    with pytest.raises(SystemExit, match="2"):
        cli.run(main)


def test_an_evaluation_is_written_without_a_reader(closed_pipe, tmp_path, monkeypatch):
    arguments = "--head nn --episodes 3 --out out --report r.html"
    monkeypatch.setattr(sys, "argv", ["eval_episodes.py", *arguments.split()])
    monkeypatch.chdir(tmp_path)
    cli.run(eval.main)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["episodes.csv", "r.html", "results.json"]


@pytest.mark.usefixtures("registered_backbones")
def test_answers_are_written_without_a_reader(closed_pipe, tmp_path, monkeypatch):
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    make_folder(tmp_path, {"a": 2}, per_class=2)
    arguments = "--support a --query a --head nn --out answers.csv --save m.safetensors"
    monkeypatch.setattr(sys, "argv", ["classify.py", *arguments.split()])
    monkeypatch.chdir(tmp_path)
    cli.run(classify.main)
    assert (tmp_path / "answers.csv").exists()
    assert (tmp_path / "m.safetensors").exists()


def test_results_are_written_before_they_are_printed(tmp_path, monkeypatch):
    out = tmp_path / "results.json"

    def text(*arguments):
        assert out.exists()
        return "shown"

    monkeypatch.setattr(eval, "text", text)
    monkeypatch.setattr(sys, "argv", ["eval", "--head", "nn", "--episodes", "2", "--out", str(tmp_path)])
    eval.main()


def test_a_killed_evaluation_leaves_no_process_and_nothing_half_written(tmp_path):
    command = [sys.executable, "-m", "fewshot_dpkl", "eval", "--head", "nn", "--episodes", "1000000"]
    arguments = ["--out", "out", "--report", "r.html", "--threads", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(command + arguments, start_new_session=True, env=environment, cwd=tmp_path)
        for _ in range(2)
    ]
    end = time.monotonic() + 60
    while min(cpu_seconds(process.pid) for process in started) < 5 and time.monotonic() < end:
        time.sleep(0.05)  # until they are past their imports
    for process, how in zip(started, (signal.SIGKILL, signal.SIGTERM), strict=True):
        assert process.poll() is None
        process.send_signal(how)
        assert process.wait(30) != 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nobody is left of its group
    assert list(tmp_path.iterdir()) == []


def cpu_seconds(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
