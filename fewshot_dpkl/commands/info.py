"""What runs here: versions, device, cores, the compiled steps or why there are none, caches.

fewshot-dpkl info
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fewshot_dpkl import __version__
from fewshot_dpkl.commands.cli import command_parser
from fewshot_dpkl.files import user_cache
from fewshot_dpkl.heads.training.compiled import outcome

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "safetensors", "pillow", "torchvision", "timm")


def main() -> None:
    command_parser(__doc__).parse_args()
    for name, value in facts():
        print(f"{name:<16}{value}")


def facts() -> list[tuple[str, str]]:
    """Names and values, one a line."""
    lines = [("fewshot-dpkl", __version__), ("python", f"{platform.python_version()}, {platform.platform()}")]
    lines += [(name, found) for name in PACKAGES if (found := installed(name))]
    lines += [("device", device()), ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()}")]
    compiled = outcome()
    lines.append(("compiled steps", f"in use, {compiled.path}" if compiled.library else "not in use"))
    if not compiled.library:
        lines.append(("  because", compiled.reason))
    cache = user_cache()
    lines.append(("cache", f"{cache}, {size(cache)}"))
    parts = sorted(part for part in cache.iterdir() if part.is_dir()) if cache.is_dir() else []
    return lines + [(f"  {part.name}", size(part)) for part in parts]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device() -> str:
    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return "mps" if torch.backends.mps.is_available() else "cpu"


def size(folder: Path) -> str:
    """Megabytes of the files in a folder and below."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:  # gone meanwhile, or not ours to see
                continue
    return f"{total / 1e6:.1f} MB"
