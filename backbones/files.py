"""Tensors with a JSON card in one safetensors file that is either whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor


def save_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], card: dict[str, Any]) -> None:
    """Write `tensors` and `card` to `path`, by way of a temporary file beside it."""
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = safetensors.torch.save(whole, metadata={"card": json.dumps(card)})
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, final)
    except OSError as error:
        raise OSError(f"cannot write {final}: {error.strerror}; nothing was changed there") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}; train one with fewshot-dpkl train")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            card = json.loads((file.metadata() or {}).get("card", "{}"))
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); write it again") from error
    return tensors, card
