"""A fitted regressor in one safetensors file, no pickle."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.regression.gp import Posterior
from fewshot_dpkl.regression.training import Model, Trained
from fewshot_dpkl.schema import Source, seal

if TYPE_CHECKING:
    from fewshot_dpkl.regression.estimators import EmbeddingGP

FORMAT, VERSION = "fewshot-dpkl-regressor", 2
SHAPES = {
    "parameters": "1 m P",
    "log_lengthscale": "1",
    "log_noise": "1",
    "nll": "1",
    "history": "checks 1",
    "x_mean": "D",
    "x_scale": "D",
    "y_shift": "2",
}
"""Of every regressor; those of the others depend on the kernel and the form of the posterior."""


def write_regressor(regressor: EmbeddingGP, path: str | os.PathLike[str]) -> None:
    """Write what `read_regressor` reads back; a seed that is no number is not kept."""
    seed = regressor.random_state if isinstance(regressor.random_state, int) else None
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "class": type(regressor).__name__,
        "params": json.dumps({**regressor.get_params(), "random_state": seed}),
        "weight_space": str(int(regressor.trained_.posterior.weight_space)),
    }
    tensors = _tensors(regressor)
    metadata["checksum"] = seal(metadata, tensors)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _tensors(regressor: EmbeddingGP) -> dict[str, Tensor]:
    """Everything a fitted regressor has learnt, by name."""
    trained = regressor.trained_
    tensors = {
        "parameters": trained.model.parameters,
        "log_lengthscale": trained.model.log_lengthscale,
        "log_noise": trained.model.log_noise,
        "embedded": trained.embedded,
        "coefficients": trained.posterior.coefficients,
        "factor": trained.posterior.factor,
        "nll": trained.posterior.nll,
        "history": trained.history,
        "x_mean": torch.as_tensor(regressor.X_mean_),
        "x_scale": torch.as_tensor(regressor.X_scale_),
        "y_shift": torch.tensor([regressor.y_mean_, regressor.y_scale_], dtype=torch.float64),
    }
    if trained.model.frequencies is not None:
        tensors["frequencies"] = trained.model.frequencies
    return tensors


def read_regressor(path: str | os.PathLike[str], regressors: Mapping[str, type[EmbeddingGP]]) -> EmbeddingGP:
    """The regressor that `write_regressor` wrote to `path`; `regressors` maps names to classes."""
    source = Source(path, "saved regressor", "give a file written by a regressor's save()")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no saved regressor at {path}; write one with regressor.save(path)")
    tensors, metadata = source.safetensors()
    if metadata.get("format") != FORMAT:
        source.no_such_kind()
    if metadata.get("version") == "1":  # of release 0.1.0, without checksum
        metadata = {**metadata, "version": str(VERSION)}
        metadata["checksum"] = seal(metadata, tensors)
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path} has format version {metadata.get('version')!s:.20}, but this release reads version "
            f"{VERSION}; load it with the release that wrote it, or fit and save again"
        )
    source.fields(metadata, {"class": str, "params": str, "weight_space": Literal["0", "1"], "checksum": str})
    if metadata["class"] not in regressors:
        source.altered(f"there is no regressor {metadata['class']!r:.60}")
    kind = regressors[metadata["class"]]
    parameters = source.parse(metadata["params"])
    regressor = kind(**source.parameters(kind, parameters, inspect.signature(kind).parameters))
    try:
        _restore(regressor, tensors, metadata, source)
    except (RuntimeError, IndexError, TypeError):
        source.altered("its tensors do not fit together")
    return regressor


def _restore(
    regressor: EmbeddingGP, tensors: dict[str, Tensor], metadata: dict[str, str], source: Source
) -> None:
    weight_space = metadata["weight_space"] == "1"
    columns = tensors["x_mean"].numel() if "x_mean" in tensors else 0
    settings = regressor.settings()
    frequencies = settings.frequencies
    lengths = {
        "D": columns,
        "m": settings.particles,
        "P": regressor.embedding(columns).count,
        "d": getattr(regressor, "latent_size", columns),
        "R": frequencies,
        "2R": 2 * frequencies,
    }
    shapes = {
        **SHAPES,
        **({"frequencies": "1 R d", "embedded": "1 n 2R"} if frequencies else {"embedded": "1 m n d"}),
        **(
            {"coefficients": "1 2R", "factor": "1 2R 2R"}
            if weight_space
            else {"coefficients": "1 n", "factor": "1 n n"}
        ),
    }
    source.shapes(tensors, shapes, lengths, may_be_infinite=("history", "x_scale"))
    if seal(metadata, tensors) != metadata["checksum"]:
        source.altered("its checksum does not fit its contents")
    regressor.n_features_in_ = columns
    regressor.X_mean_, regressor.X_scale_ = tensors["x_mean"].numpy(), tensors["x_scale"].numpy()
    regressor.y_mean_, regressor.y_scale_ = tensors["y_shift"].tolist()
    model = Model(
        regressor.embedding(columns),
        tensors["parameters"],
        tensors["log_lengthscale"],
        tensors["log_noise"],
        tensors.get("frequencies"),
        settings.prior,
    )
    posterior = Posterior(tensors["coefficients"], tensors["factor"], None, tensors["nll"], weight_space)
    regressor.trained_ = Trained(model, tensors["embedded"], posterior, tensors["history"])
    regressor.trained_.predict(torch.zeros(1, 1, columns))  # what does not fit fails here, not later
    regressor._publish()
