"""Four rooms, one direction: who may import whom, and nothing that must not be used."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED = {"files", "parallel", "schema"}  # used by all
ALLOWED = {  # room: the rooms that it may import from, besides itself
    "kernels": set(),
    "particles": set(),
    "files": set(),
    "parallel": set(),
    "schema": set(),
    "heads": {"kernels", "particles", *SHARED},
    "regression": {"kernels", "particles", *SHARED},
    "evaluation": {"heads", *SHARED},
    "pictures": {"heads", *SHARED},
    "experiments": {"kernels", "heads", "regression", "evaluation", *SHARED},
    "data": {"files", "schema", "pictures"},  # a picture is decoded in one place
    "backbones": {"schema"},  # a file is checked in one place, too
}


def room_of(module: str) -> str | None:
    """`fewshot_dpkl.heads.base` is in the room `heads`; other libraries are in none."""
    parts = module.split(".")
    return parts[1] if parts[0] == "fewshot_dpkl" and len(parts) > 1 else None


def rooms_imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules = [node.module]
            if node.module == "fewshot_dpkl":
                modules = [f"fewshot_dpkl.{alias.name}" for alias in node.names]
        rooms |= {room for module in modules if (room := room_of(module))}
    return rooms


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_in_one_direction(room):
    place = ROOT / room if room in ("data", "backbones") else ROOT / "fewshot_dpkl" / room
    paths = list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    for path in paths:
        assert rooms_imported(path) <= ALLOWED[room] | {room}, path


def test_every_module_is_in_a_room():
    known = {*ALLOWED, "commands", "__init__", "__main__", "public", "assets", "__pycache__", "py"}
    assert {path.name.split(".")[0] for path in (ROOT / "fewshot_dpkl").iterdir()} <= known


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
            assert not called(path) & {"pickle.load", "pickle.loads", "allow_pickle=True"}, path
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.load":
                    assert "weights_only=True" in map(ast.unparse, call.keywords), path
            assert not any(name.endswith(".cuda") for name in called(path)), path


def test_no_file_of_the_package_is_longer_than_350_lines():
    for room in ("fewshot_dpkl", "backbones", "data", "scripts"):
        for path in (ROOT / room).rglob("*.*"):
            if path.suffix in (".py", ".c", ".h", ".html", ".css"):
                assert len(path.read_text("utf-8").splitlines()) <= 350, path
