"""scikit-learn regressors: the one-trial view of the model in `training`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.regression.embeddings import Embedding, Lengthscales, Network
from fewshot_dpkl.regression.gp import Posterior, cholesky
from fewshot_dpkl.regression.training import Model, Prior, Settings, Trained, initial_model, train

FORMAT, VERSION = "fewshot-dpkl-regressor", 1


class _EmbeddingGP(RegressorMixin, BaseEstimator):
    """A GP on embedded inputs. The children name the parameters and choose the embedding."""

    noise: float
    random_state: Any
    device: str
    standardize: bool

    def settings(self) -> Settings:
        """The training settings this estimator stands for."""
        names = {field.name for field in fields(Settings)}
        given = {name: value for name, value in self.get_params().items() if name in names}
        return _checked(Settings(**{**given, **self._fixed()}))

    def _fixed(self) -> dict[str, Any]:
        raise NotImplementedError

    def embedding(self, dimension: int) -> Embedding:
        """The embedding of inputs with `dimension` columns."""
        raise NotImplementedError

    def start(self, dimension: int, seeds: Sequence[int]) -> Model:
        """Untrained models for one trial per seed."""
        latent_size = getattr(self, "latent_size", dimension)
        return initial_model(self.embedding(dimension), self.settings(), seeds, latent_size)

    def fit(self, X: Any, y: Any, unlabeled: Any = None) -> _EmbeddingGP:
        """Train on inputs X `[n, D]` and targets y `[n]`; semi-supervised with `unlabeled` inputs `[n_u, D]`.

        The labelled points are shuffled and the last tenth is held out to choose the epoch.
        """
        X, y = validate_data(
            self, _numpy(X), _numpy(y), dtype=np.float64, y_numeric=True, ensure_min_samples=2
        )
        y = y.astype(np.float64)
        if unlabeled is not None:
            unlabeled = check_array(_numpy(unlabeled), dtype=np.float64, input_name="unlabeled")
            if unlabeled.shape[1] != X.shape[1]:
                columns = f"unlabeled has {unlabeled.shape[1]} columns, but X has {X.shape[1]}"
                raise ValueError(f"{columns}; give the same inputs in both")
        self._standardise(X, y)
        random = check_random_state(self.random_state)
        order = random.permutation(len(X))
        seed = int(random.randint(2**31 - 1))
        device = _device(self.device)
        model = self.start(X.shape[1], [seed]).to(device)
        inputs = self._inputs(X[order]).float().to(device)
        targets = torch.as_tensor((y[order] - self.y_mean_) / self.y_scale_).unsqueeze(0).to(device)
        others = None if unlabeled is None else self._inputs(unlabeled).float().to(device)
        self.trained_ = train(model, inputs, targets, others, self.settings()).cpu()
        self._publish()
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of y `[q]` at X `[q, D]`; with `return_std` also its standard deviation, noise included."""
        inputs = self._new_inputs(X)
        mean, variance = self.trained_.predict(inputs)
        if not torch.isfinite(mean + variance).all():
            raise ValueError(
                "X holds values too far from the training points to compute with; look at its units"
            )
        mean_y = mean[0].numpy() * self.y_scale_ + self.y_mean_
        return (mean_y, variance[0].sqrt().numpy() * self.y_scale_) if return_std else mean_y

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Joint draws of y (noise included) from the posterior at X `[q, D]`: `[q, n_samples]`."""
        inputs = self._new_inputs(X)
        mean, _ = self.trained_.predict(inputs)
        factor = cholesky(self.trained_.covariance(inputs))[0].numpy()
        draws = check_random_state(random_state).standard_normal((len(factor), n_samples))
        return (mean[0].numpy()[:, None] + factor @ draws) * self.y_scale_ + self.y_mean_

    def latent(self, X: Any) -> np.ndarray:
        """The latent points g_w(x) / ℓ of every particle, `[m, q, d]`; the paper draws their mean over m."""
        inputs = self._new_inputs(X)
        with torch.no_grad():
            return self.trained_.model.latent(inputs)[0].numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted regressor to one safetensors file (no pickle); `load_regressor` reads it back."""
        check_is_fitted(self, "trained_")
        params = {name: value for name, value in self.get_params().items() if name != "random_state"}
        seed = self.random_state if isinstance(self.random_state, int) else None
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "class": type(self).__name__,
            "params": json.dumps({**params, "random_state": seed}),
            "weight_space": str(int(self.trained_.posterior.weight_space)),
        }
        with atomic_path(path) as temporary:
            save_file(_tensors(self), temporary, metadata=metadata)

    def _standardise(self, X: np.ndarray, y: np.ndarray) -> None:
        """Centre and scale on the training points; a constant column tells nothing and is dropped."""
        columns, self.y_mean_, self.y_scale_ = X.shape[1], 0.0, 1.0
        self.X_mean_, self.X_scale_ = np.zeros(columns), np.ones(columns)
        if not self.standardize:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            self.X_mean_, spread = X.mean(0), X.std(0)
            self.y_mean_, scale = float(y.mean()), float(y.std())
        if not np.isfinite([*self.X_mean_, *spread, self.y_mean_, scale]).all():
            raise ValueError("X or y holds values too large to standardise; rescale them first")
        constant = spread <= 1e-12 * np.abs(self.X_mean_)  # the rounding of a mean is not a spread
        self.X_scale_ = np.where(constant, np.inf, spread)
        if scale <= 1e-12 * abs(self.y_mean_):
            warnings.warn(
                f"the target is constant ({self.y_mean_:g}): every prediction is that value, and the "
                "standard deviation is in units of 1; give targets that vary",
                stacklevel=3,
            )
            scale, self.y_mean_ = 1.0, float(y[0])
        self.y_scale_ = scale

    def _inputs(self, X: np.ndarray) -> Tensor:
        with np.errstate(over="ignore"):
            return torch.as_tensor((X - self.X_mean_) / self.X_scale_).unsqueeze(0)  # 1 q D

    def _new_inputs(self, X: Any) -> Tensor:
        check_is_fitted(self, "trained_")
        return self._inputs(validate_data(self, _numpy(X), dtype=np.float64, reset=False))

    def _publish(self) -> None:
        """Plain numbers a user may want to read."""
        model = self.trained_.model
        self.noise_ = float(model.log_noise.exp())
        self.validation_error_ = self.trained_.history[:, 0].numpy()
        self.log_marginal_likelihood_ = -float(self.trained_.posterior.nll)
        if isinstance(model.embedding, Lengthscales):
            self.lengthscales_ = model.parameters[0, 0].exp().numpy()
        else:
            self.lengthscale_ = float(model.log_lengthscale.exp())


class GPRegressor(_EmbeddingGP):
    """A GP with the ARD squared-exponential kernel on the inputs (section 4); SSGP with unlabelled inputs.

    Args:
        lengthscale: where every column's lengthscale starts; None for √D.
        noise: noise variance of the standardised target (the paper: 1).
        alpha: weight of the unlabelled points' posterior variance.
        epochs: full-batch steps of Nadam.
        lr: learning rate (of the log lengthscales).
        validation_fraction: share held out; its RMSE (NLL if the noise is learnt) chooses the epoch.
        check_every: epochs between two looks at the held-out points.
        use_validation: predict from the held-out points too, once they have chosen the epoch.
        learn_noise: learn the noise variance by marginal likelihood (beyond the paper).
        hyper_lr: learning rate of its logarithm.
        standardize: centre and scale inputs and target on the training points.
        random_state: what the shuffle follows from.
        device: `cpu` or `cuda`.
    """

    def __init__(
        self,
        *,
        lengthscale: float | None = None,
        noise: float = 1.0,
        alpha: float = 1.0,
        epochs: int = 50,
        lr: float = 1e-3,
        validation_fraction: float = 0.1,
        check_every: int = 10,
        use_validation: bool = False,
        learn_noise: bool = False,
        hyper_lr: float = 0.05,
        standardize: bool = True,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.lengthscale = lengthscale
        self.noise = noise
        self.alpha = alpha
        self.epochs = epochs
        self.lr = lr
        self.validation_fraction = validation_fraction
        self.check_every = check_every
        self.use_validation = use_validation
        self.learn_noise = learn_noise
        self.hyper_lr = hyper_lr
        self.standardize = standardize
        self.random_state = random_state
        self.device = device

    def _fixed(self) -> dict[str, Any]:
        return {"particles": 1, "frequencies": 0, "lengthscale": 1.0}

    def embedding(self, dimension: int) -> Embedding:
        if self.lengthscale is not None and not self.lengthscale > 0:
            raise ValueError(f"lengthscale is {self.lengthscale}; give a positive number, or None for √D")
        return Lengthscales(dimension, self.lengthscale)


class DKLRegressor(_EmbeddingGP):
    """Deep kernel learning: the SE kernel on one network's latent points; SSDKL with unlabelled inputs.

    It is `DPKLRegressor` with one particle and the closed-form kernel.

    Args:
        hidden: widths of the hidden layers.
        latent_size: d, the size of the latent space.
        lengthscale: ℓ of the kernel in the latent space.
        learn_lengthscale: learn ℓ by marginal likelihood (beyond the paper).

    The others are those of `GPRegressor`; `lr` is the networks'.
    """

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (100, 50, 50),
        latent_size: int = 2,
        lengthscale: float = 1.0,
        noise: float = 1.0,
        alpha: float = 1.0,
        epochs: int = 50,
        lr: float = 1e-3,
        validation_fraction: float = 0.1,
        check_every: int = 10,
        use_validation: bool = False,
        learn_noise: bool = False,
        learn_lengthscale: bool = False,
        hyper_lr: float = 0.05,
        standardize: bool = True,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.hidden = hidden
        self.latent_size = latent_size
        self.lengthscale = lengthscale
        self.noise = noise
        self.alpha = alpha
        self.epochs = epochs
        self.lr = lr
        self.validation_fraction = validation_fraction
        self.check_every = check_every
        self.use_validation = use_validation
        self.learn_noise = learn_noise
        self.learn_lengthscale = learn_lengthscale
        self.hyper_lr = hyper_lr
        self.standardize = standardize
        self.random_state = random_state
        self.device = device

    def _fixed(self) -> dict[str, Any]:
        return {"particles": 1, "frequencies": 0}

    def embedding(self, dimension: int) -> Embedding:
        return Network((dimension, *self.hidden, self.latent_size))


class DPKLRegressor(_EmbeddingGP):
    """Deep probabilistic kernel learning (Algorithm 1); SSDPKL with unlabelled inputs (equation 14).

    Args:
        particles: m, the networks that stand for the distribution of weights.
        kernel: `fourier` for random Fourier features, `exact` for the closed form over all pairs.
        n_frequencies: R; the features are 2R.
        prior: k** of a new point: `own` for the model's |μ(x)|², `unit` for the authors' 1.

    The others are those of `DKLRegressor`.
    """

    def __init__(
        self,
        *,
        particles: int = 10,
        kernel: Literal["fourier", "exact"] = "fourier",
        n_frequencies: int = 100,
        prior: Prior = "own",
        hidden: Sequence[int] = (100, 50, 50),
        latent_size: int = 2,
        lengthscale: float = 1.0,
        noise: float = 1.0,
        alpha: float = 1.0,
        epochs: int = 50,
        lr: float = 1e-3,
        validation_fraction: float = 0.1,
        check_every: int = 10,
        use_validation: bool = False,
        learn_noise: bool = False,
        learn_lengthscale: bool = False,
        hyper_lr: float = 0.05,
        standardize: bool = True,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.particles = particles
        self.kernel = kernel
        self.n_frequencies = n_frequencies
        self.prior = prior
        self.hidden = hidden
        self.latent_size = latent_size
        self.lengthscale = lengthscale
        self.noise = noise
        self.alpha = alpha
        self.epochs = epochs
        self.lr = lr
        self.validation_fraction = validation_fraction
        self.check_every = check_every
        self.use_validation = use_validation
        self.learn_noise = learn_noise
        self.learn_lengthscale = learn_lengthscale
        self.hyper_lr = hyper_lr
        self.standardize = standardize
        self.random_state = random_state
        self.device = device

    def _fixed(self) -> dict[str, Any]:
        if self.kernel not in ("fourier", "exact"):
            raise ValueError(f"kernel is {self.kernel!r}; use 'fourier' or 'exact'")
        if self.kernel == "fourier" and self.n_frequencies < 1:
            raise ValueError(f"n_frequencies is {self.n_frequencies}; give at least 1, or use kernel='exact'")
        return {"frequencies": self.n_frequencies if self.kernel == "fourier" else 0}

    def embedding(self, dimension: int) -> Embedding:
        return Network((dimension, *self.hidden, self.latent_size))


REGRESSORS: dict[str, type[_EmbeddingGP]] = {
    cls.__name__: cls for cls in (GPRegressor, DKLRegressor, DPKLRegressor)
}


def _checked(settings: Settings) -> Settings:
    """`settings`, or a sentence about the first value that cannot work."""
    for name in ("lengthscale", "noise", "lr", "hyper_lr"):
        if not 0 < getattr(settings, name) < np.inf:
            raise ValueError(f"{name} is {getattr(settings, name)}; give a positive number")
    for name in ("particles", "check_every"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; give at least 1")
    if settings.alpha < 0 or settings.epochs < 0:
        raise ValueError("alpha and epochs cannot be negative; 0 switches them off")
    if not 0 <= settings.validation_fraction < 1:
        raise ValueError(
            f"validation_fraction is {settings.validation_fraction}; give a share from 0 to below 1"
        )
    if settings.prior not in ("own", "unit"):
        raise ValueError(f"prior is {settings.prior!r}; use 'own' or 'unit'")
    return settings


def _numpy(array: Any) -> Any:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else array


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "mps":
        raise ValueError("device mps has no float64, which a GP needs; use device='cpu'")
    return device


def _tensors(regressor: _EmbeddingGP) -> dict[str, Tensor]:
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


def load_regressor(path: str | os.PathLike[str]) -> _EmbeddingGP:
    """Read what `save` wrote: the same class and parameters, and the same predictions bit for bit."""
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
        regressor = REGRESSORS[metadata["class"]](**params)
        _restore(regressor, tensors, metadata["weight_space"] == "1")
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{path} does not fit together ({error}); fit and save the regressor again"
        ) from None
    return regressor


def _restore(regressor: _EmbeddingGP, tensors: dict[str, Tensor], weight_space: bool) -> None:
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
