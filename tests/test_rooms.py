"""Four rooms, one direction: who may import whom, and nothing that must not be used."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "fewshot_dpkl": {"backbones", "data", "scripts", "benchmarks", "tests"},
    "backbones": {"fewshot_dpkl", "data", "scripts", "benchmarks", "tests"},
    "data": {"backbones", "scripts", "benchmarks", "tests"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_import_in_one_direction(room):
    for path in (ROOT / room).rglob("*.py"):
        assert not imported(path) & FORBIDDEN[room], path


def called(path: Path) -> set[str]:
    """What a file calls, as written: `np.load`, `x.cuda`; keyword arguments as `name=value`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            names.add(ast.unparse(node.func))
            names |= {ast.unparse(keyword) for keyword in node.keywords}
    return names


def test_nothing_is_unpickled_and_no_device_is_hard_coded():
    for room in ("fewshot_dpkl", "backbones", "data", "scripts", "benchmarks", "examples"):
        for path in (ROOT / room).rglob("*.py"):
            assert not called(path) & {"torch.load", "pickle.load", "pickle.loads", "allow_pickle=True"}, path
            assert not any(name.endswith(".cuda") for name in called(path)), path
