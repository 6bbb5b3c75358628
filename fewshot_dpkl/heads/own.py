"""Heads of one's own, by import path or entry point, and scikit-learn classifiers with `predict_proba`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State

GROUP = "fewshot_dpkl.heads"
"""The entry points by which an installed package offers heads: a name and its class."""


class PerEpisodeHead(Head):
    """A scikit-learn classifier as a head: a clone of it for each episode, seeded by the episode's seed.

    It is for `evaluate`; to fit one, call the classifier itself.
    """

    episodes_at_once = 8

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        fitted = []
        for x, y, seed in zip(support.cpu().numpy(), labels.cpu().numpy(), seeds, strict=True):
            classifier = clone(self.classifier)
            drawn = [name for name in classifier.get_params() if name.split("__")[-1] == "random_state"]
            classifier.set_params(**dict.fromkeys(drawn, seed % 2**32))
            fitted.append(classifier.fit(x, y))
        return {"classifiers": fitted}  # type: ignore[dict-item]

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        answers = zip(state["classifiers"], query.cpu().numpy(), strict=True)
        p = np.stack([classifier.predict_proba(x) for classifier, x in answers])
        return torch.as_tensor(p, dtype=query.dtype, device=query.device).clamp_min(1e-12).log()


def as_head(given: Any, name: str = "this object") -> Head:
    """A head as it is; a scikit-learn classifier as a head for `evaluate`."""
    if isinstance(given, Head):
        return given
    if hasattr(given, "fit") and hasattr(given, "predict_proba") and hasattr(given, "get_params"):
        return PerEpisodeHead(given)
    raise ValueError(
        f"{name} is neither a Head nor a scikit-learn classifier with predict_proba; one without it can be "
        "wrapped in sklearn.calibration.CalibratedClassifierCV"
    )


def named_class(name: str, heads: Mapping[str, type[Head]]) -> Any:
    """The class called `name`, one of `heads` or an entry point's; None if there is none."""
    if name in heads:
        return heads[name]
    offered = entry_points(group=GROUP, name=name)
    return _imported(next(iter(offered))) if offered else None


def find_class(name: str, heads: Mapping[str, type[Head]]) -> Any:
    """The class called `name`, or that of an import path `package.module:Name`."""
    found = _imported(EntryPoint(name, name, GROUP)) if ":" in name else named_class(name, heads)
    if found is None:
        names = [*heads, *(point.name for point in entry_points(group=GROUP))]
        raise ValueError(
            f"there is no head {name!r}; choose from {', '.join(names)}, "
            "or name a class of your own as package.module:Name"
        )
    return found


def find_heads(names: Sequence[str], heads: Mapping[str, type[Head]]) -> Iterator[tuple[str, Head]]:
    """Short names and new heads for `evaluate`, of what `find_class` finds."""
    taken: set[str] = set()
    for name in names:
        try:
            made = find_class(name, heads)()
        except TypeError as error:
            raise ValueError(f"head {name} cannot be made without parameters ({error})") from error
        short = name if ":" not in name else getattr(made, "name", type(made).__name__)
        short = name if short in taken else short
        taken.add(short)
        yield short, as_head(made, name)


def _imported(point: EntryPoint) -> Any:
    """The class of an entry point or import path, with a sentence where there is none."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder: `fewshot-dpkl` starts without it
    try:
        import_module(point.module)
        return point.load()
    except AttributeError as error:
        raise ValueError(f"head {point.value}: {error}") from error
    except Exception as error:  # whatever a module of the user's raises
        raise ValueError(
            f"head {point.value}: importing {point.module} failed ({type(error).__name__}: {error}); install "
            "it, or start the command in its folder"
        ) from error
