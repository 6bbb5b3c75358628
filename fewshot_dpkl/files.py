"""Files that are either whole or not there, and where those of the user are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` on success, remove it on failure.

    The temporary name keeps the suffix of `path`, because some writers choose the format by it.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}.{os.getpid()}.tmp{final.suffix}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask allows; some writers allow less
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def user_cache() -> Path:
    """$FEWSHOT_DPKL_CACHE, else fewshot-dpkl in the user's cache folder."""
    if os.environ.get("FEWSHOT_DPKL_CACHE"):
        return Path(os.environ["FEWSHOT_DPKL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewshot-dpkl"
