"""A fitted head in one safetensors file, no pickle."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.schema import Source, seal

if TYPE_CHECKING:
    from fewshot_dpkl.heads.base import Head

FORMAT_VERSION = 2
KEY = "fewshot_dpkl"
HEADER = {
    "head": str,
    "parameters": dict,
    "classes": list,
    "classes_dtype": str,
    "order": list[int],
    "n_features": int,
    "state": dict,
    "checksum": str,
}


def write_head(head: Head, path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write what `read_head` reads back; `metadata` is kept beside it."""
    tensors = {name: tensor.cpu() for name, tensor in head.state_.items()}
    header = description(head)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={**metadata, KEY: json.dumps(header)})


def description(head: Head) -> dict[str, Any]:
    """All that a fitted head consists of but its tensors, with a checksum of both."""
    document = {
        "version": FORMAT_VERSION,
        "head": head.name,
        "parameters": {key: value for key, value in head.get_params().items() if key != "random_state"},
        "classes": head.classes_.tolist(),
        "classes_dtype": head.classes_.dtype.str if head.classes_.dtype != object else "O",
        "order": head._order.tolist(),
        "n_features": head.n_features_in_,
        "state": {name: list(tensor.shape) for name, tensor in head.state_.items()},
    }
    document = json.loads(json.dumps(document))  # as it will be read back
    return {**document, "checksum": seal(document, head.state_)}


def read_head(path: str | os.PathLike[str], find: Callable[[str], type[Head] | None]) -> Head:
    """The head that `write_head` wrote to `path`; `find` gives the class of a name, if there is one."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no saved head at {path}; write one with head.save(path)")
    source = Source(path, "saved head", "write one with head.save(path)")
    tensors, metadata = source.safetensors()
    if KEY not in metadata:
        source.no_such_kind()
    header = source.parse(metadata[KEY])
    if header.get("version") == 1:  # of release 0.1.0, without shapes and checksum
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        header = {**header, "version": FORMAT_VERSION, "state": shapes}
        if header.get("head") == "dpkl" and isinstance(header.get("parameters"), dict):
            header["parameters"] = {**header["parameters"], "rotation": "uniform"}  # the only one there was
        header["checksum"] = seal(header, tensors)
    if header.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has head format {header.get('version')!s:.20}, this version of fewshot-dpkl reads "
            f"format {FORMAT_VERSION}; fit and save the head again"
        )
    source.fields(header, HEADER)
    kind = find(header["head"])
    if kind is None:
        source.refuse(f"holds a head {header['head']!r:.60}, but there is no head of that name")
    names = inspect.signature(kind).parameters
    head = kind(**source.parameters(kind, header["parameters"], names))
    head.classes_ = source.labels(header["classes"], header["classes_dtype"])
    if sorted(header["order"]) != list(range(len(head.classes_))):
        source.altered(f"the order of its {len(head.classes_)} classes names others")
    head._order = torch.tensor(header["order"]).numpy()
    head.n_features_in_ = header["n_features"]
    head.state_ = tensors
    _check_state(head, header, tensors, source)
    return head


def _check_state(head: Head, header: dict[str, Any], tensors: dict[str, Tensor], source: Source) -> None:
    """The tensors are those of the header, and the head can answer with them."""
    if not all(isinstance(shape, list) for shape in header["state"].values()):
        source.altered("the shapes in its header are no lists")
    source.shapes(tensors, {name: " ".join(map(str, shape)) for name, shape in header["state"].items()})
    if seal(header, tensors) != header["checksum"]:
        source.altered("its checksum does not fit its contents")
    if head.n_features_in_ not in {size for tensor in tensors.values() for size in tensor.shape}:
        source.altered(f"it has {head.n_features_in_} features, but none of its tensors has")
    try:
        asked = torch.zeros(1, 1, head.n_features_in_)
        found = list(head.log_proba_episodes(tensors, asked).shape)
    except (KeyError, IndexError, RuntimeError, ValueError, TypeError):
        found = None
    if found != [1, 1, len(head.classes_)]:
        source.altered(f"its tensors are not those of a {head.name} with {len(head.classes_)} classes")
