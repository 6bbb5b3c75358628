"""Tensors with a JSON card in one safetensors file that is either whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from fewshot_dpkl.schema import Source, seal


def save_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], card: dict[str, Any]) -> None:
    """Write `tensors` and `card` to `path`, by way of a temporary file beside it."""
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksum = seal(card, whole)
    content = safetensors.torch.save(whole, metadata={"card": json.dumps(card), "checksum": checksum})
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
    source = Source(
        path, "whole safetensors file", "give one written by fewshot-dpkl train, or write it again"
    )
    tensors, metadata = source.safetensors()
    card = source.parse(metadata.get("card", "{}"))
    unknown = set(metadata) - {"card", "checksum", "format"}
    if unknown or metadata.get("checksum", seal(card, tensors)) != seal(card, tensors):  # old files have none
        source.altered("its checksum does not fit its contents")
    return tensors, card
