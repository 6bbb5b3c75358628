"""The examples run, with small models and without a network."""

from __future__ import annotations

import importlib.util
import runpy
import sys

import pytest

from tests.conftest import ROOT
from tests.picture_files import make_folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torchvision_backbone", ["--model", "mobilenet_v3_small", "--untrained"]),
        ("timm_backbone", ["--model", "test_vit", "--untrained"]),
        ("own_module", ["--save", "colours.safetensors"]),
    ],
)
def test_an_example_classifies_pictures(name, options, tmp_path, monkeypatch, capsys):
    if name.startswith("timm") and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    make_folder(tmp_path, {"support": 2, "query": 2}, per_class=2)
    for place in ("support", "support/support-0", "query"):  # what a Mac leaves behind
        (tmp_path / place / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "support", "query", *options])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    answers = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [answer[0] for answer in answers] == [f"query/query-{c}/{i}.png" for c in (0, 1) for i in (0, 1)]
    assert {answer[1] for answer in answers} <= {"support-0", "support-1"}
    if name == "own_module":  # colours tell these classes apart
        assert [answer[1][-1] for answer in answers] == ["0", "0", "1", "1"]
        assert (tmp_path / "colours.safetensors").is_file()
