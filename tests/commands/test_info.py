"""`fewshot-dpkl info`: what runs here, and if steps are not compiled, why."""

import sys
import warnings

import pytest

from fewshot_dpkl.commands import info
from fewshot_dpkl.heads.training import compiled


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """What the command prints, by the first words of its lines, with some variables set."""

    def run(**environment):
        monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["fewshot-dpkl info"])
        compiled.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            info.main()
        return {line[:16].strip(): line[16:] for line in capsys.readouterr().out.splitlines()}

    yield run
    compiled.forget()


def test_a_compiler_that_fails_is_quoted(printed):
    said = printed(CC="sh -c 'echo fatal error: no room >&2; exit 1' cc")
    assert said["compiled steps"] == "not in use"
    assert said["because"] == "sh failed: fatal error: no room"
    assert {"fewshot-dpkl", "python", "torch", "device", "cores"} <= set(said)


def test_caches_are_listed_with_their_sizes(printed, tmp_path):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "a").write_bytes(b"0" * 2_500_000)
    said = printed(FEWSHOT_DPKL_COMPILE="0")
    assert said["because"] == "FEWSHOT_DPKL_COMPILE is 0"
    assert said["cache"] == f"{tmp_path}, 2.5 MB"
    assert said["features"] == "2.5 MB"
