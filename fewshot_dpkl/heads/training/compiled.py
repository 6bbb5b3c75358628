"""steps.c, answers.c and cosine.c, compiled once by the C compiler of the machine, if it has one, and kept.

Without a compiler torch does the same, several times slower; `FEWSHOT_DPKL_COMPILE=0` asks for that. Why
there is no compiled library is kept for `fewshot-dpkl info`. What is loaded was compiled by this user, for
this processor, is whole, and has given torch's results in a small check.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewshot_dpkl.files import atomic_path, user_cache

HERE = Path(__file__).parent
SOURCES = tuple(HERE / name for name in ("steps.c", "answers.c", "cosine.c"))
HEADERS = tuple(HERE / name for name in ("moves.h", "forms.h", "lanes.h"))
FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PROCESSOR = (("-march=native", "-mprefer-vector-width=512"), ("-mcpu=native",))  # x86; others
PATIENCE = 60.0  # seconds that a compiler gets


class NotCompiled(Exception):
    """Why there is no compiled library."""


@dataclass(frozen=True)
class Outcome:
    """The library, or why there is none."""

    library: Any = None
    path: Path | None = None
    reason: str = ""


_lock = threading.Lock()
_outcome: Outcome | None = None
_tried = threading.local()  # the outcome that a thread checks a library with


def library() -> Any:
    """The functions of the C files, or None if they cannot be had here."""
    return outcome().library


def outcome() -> Outcome:
    """The library, or why there is none; found out once in a process."""
    global _outcome
    if hasattr(_tried, "outcome"):
        return _tried.outcome
    with _lock:
        if _outcome is None:
            _outcome = _find()
        return _outcome


def forget() -> None:
    """Find out again at the next call."""
    global _outcome
    with _lock:
        _outcome = None


def _find() -> Outcome:
    if os.environ.get("FEWSHOT_DPKL_COMPILE") == "0":
        return Outcome(reason="FEWSHOT_DPKL_COMPILE is 0")
    compiler, reasons = shlex.split(os.environ.get("CC", "cc")), []
    for processor in PROCESSOR:
        try:
            path = _compiled([*compiler, *FLAGS, *processor])
            return Outcome(ctypes.CDLL(str(path)), path)
        except (OSError, NotCompiled) as error:
            reasons.append(str(error))
    warnings.warn(
        f"training steps are taken by torch, several times slower than compiled: {reasons[0]}", stacklevel=2
    )
    return Outcome(reason=reasons[0])


def _compiled(command: list[str]) -> Path:
    """The library that this command makes of the sources, from the cache if it is there and sound."""
    # The macros that a compiler knows tell its version and the instructions of this processor.
    macros = _output([*command, "-dM", "-E", "-x", "c", os.devnull])
    sources = b"".join(file.read_bytes() for file in (*SOURCES, *HEADERS))
    key = hashlib.sha256(macros + sources + " ".join(command).encode()).hexdigest()[:16]
    path = own_folder(user_cache() / "compiled") / f"steps-{key}.so"
    checksum = path.with_suffix(".sha256")
    if not _is_sound(path, checksum):
        with atomic_path(path) as temporary:
            _output([*command, "-o", str(temporary), *map(str, SOURCES), "-lm"])
            temporary.chmod(0o600)
            if not _gives_what_torch_gives(temporary):
                raise NotCompiled("compiled steps differ from those of torch on this processor")
            digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
        with atomic_path(checksum) as temporary:
            temporary.write_text(digest)
    return path


def own_folder(folder: Path) -> Path:
    """A folder that is this user's and closed to all others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise NotCompiled(f"{folder} belongs to another user; set FEWSHOT_DPKL_CACHE to a folder of your own")
    folder.chmod(0o700)
    return folder


def _is_sound(path: Path, checksum: Path) -> bool:
    """Whether the library is there, this user's, and what was written."""
    try:
        if hasattr(os, "getuid") and any(file.lstat().st_uid != os.getuid() for file in (path, checksum)):
            return False
        return checksum.read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _output(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise NotCompiled(f"{command[0]} took longer than {PATIENCE:g} seconds") from None
    except OSError as error:
        raise NotCompiled(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        words = " ".join(done.stderr.decode(errors="replace").split())
        raise NotCompiled(f"{command[0]} failed: {words[:500] or f'exit status {done.returncode}'}")
    return done.stdout


def _gives_what_torch_gives(path: Path) -> bool:
    """Whether the library, tried on small models of every kind, gives what torch gives."""
    from fewshot_dpkl.heads.training.check import trained

    results = []
    for tried in (Outcome(), Outcome(ctypes.CDLL(str(path)), path)):
        _tried.outcome = tried
        try:
            results.append(trained())
        finally:
            del _tried.outcome
    return all(bool((a - b).abs().max() < 1e-3) for a, b in zip(*results, strict=True))
