"""A fitted regressor in one safetensors file, no pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.regression.gp import Posterior
from fewshot_dpkl.regression.training import Model, Trained

if TYPE_CHECKING:
    from fewshot_dpkl.regression.estimators import EmbeddingGP

FORMAT, VERSION = "fewshot-dpkl-regressor", 1


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
    with atomic_path(path) as temporary:
        save_file(_tensors(regressor), temporary, metadata=metadata)


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
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # a copy: in memory as torch aligns it, so that not a bit of a matrix product changes
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); save the regressor again"
        ) from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved regressor; give a file written by a regressor's save()")
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path} has format version {metadata.get('version')}, but this release reads version {VERSION}; "
            "load it with the release that wrote it, or fit and save again"
        )
    params = json.loads(metadata["params"])
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    try:
        regressor = regressors[metadata["class"]](**params)
        _restore(regressor, tensors, metadata["weight_space"] == "1")
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{path} does not fit together ({error}); fit and save the regressor again"
        ) from None
    return regressor


def _restore(regressor: EmbeddingGP, tensors: dict[str, Tensor], weight_space: bool) -> None:
    columns = len(tensors["x_mean"])
    expected = regressor.start(columns, [0]).parameters.shape
    if tensors["parameters"].shape != expected:
        raise KeyError(f"parameters are {list(tensors['parameters'].shape)}, expected {list(expected)}")
    regressor.n_features_in_ = columns
    regressor.X_mean_, regressor.X_scale_ = tensors["x_mean"].numpy(), tensors["x_scale"].numpy()
    regressor.y_mean_, regressor.y_scale_ = tensors["y_shift"].tolist()
    model = Model(
        regressor.embedding(columns),
        tensors["parameters"],
        tensors["log_lengthscale"],
        tensors["log_noise"],
        tensors.get("frequencies"),
        regressor.settings().prior,
    )
    posterior = Posterior(tensors["coefficients"], tensors["factor"], None, tensors["nll"], weight_space)
    regressor.trained_ = Trained(model, tensors["embedded"], posterior, tensors["history"])
    regressor.trained_.predict(torch.zeros(1, 1, columns))  # sizes that do not fit fail here, not later
    regressor._publish()
