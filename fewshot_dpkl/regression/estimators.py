"""scikit-learn regressors: the one-trial view of the model in `training`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fewshot_dpkl.regression.embeddings import Embedding, Lengthscales, Network
from fewshot_dpkl.regression.gp import cholesky
from fewshot_dpkl.regression.saved import read_regressor, write_regressor
from fewshot_dpkl.regression.training import Model, Prior, Schedule, Settings, initial_model, train


@dataclass(eq=False, repr=False, kw_only=True)
class EmbeddingGP(RegressorMixin, BaseEstimator, Schedule):
    """A GP on embedded inputs. The children choose the embedding.

    Args:
        noise: noise variance of the standardised target (the paper: 1).
        alpha: weight of the unlabelled points' posterior variance.
        epochs: full-batch steps of Nadam.
        lr: learning rate (of the networks, or of a GP's log lengthscales).
        validation_fraction: share held out; its RMSE (NLL if the noise is learnt) chooses the epoch.
        check_every: epochs between two looks at the held-out points.
        use_validation: predict from the held-out points too, once they have chosen the epoch.
        learn_noise: learn the noise variance by marginal likelihood (beyond the paper).
        hyper_lr: learning rate of its logarithm.
        standardize: centre and scale inputs and target on the training points.
        random_state: what the shuffle and the initial weights follow from.
        device: `cpu` or `cuda`.
    """

    standardize: bool = True
    random_state: Any = None
    device: str = "cpu"

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

    def fit(self, X: Any, y: Any, unlabeled: Any = None) -> EmbeddingGP:
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
        write_regressor(self, path)

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


@dataclass(eq=False, repr=False, kw_only=True)
class GPRegressor(EmbeddingGP):
    """A GP with the ARD squared-exponential kernel on the inputs (section 4); SSGP with unlabelled inputs.

    Args:
        lengthscale: where every column's lengthscale starts; None for √D.

    The others are those of `EmbeddingGP`.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl.regression import GPRegressor
        >>> X = np.linspace(-2, 2, 20)[:, None]
        >>> model = GPRegressor(noise=0.1, random_state=0).fit(X, X[:, 0] ** 2)
        >>> mean, std = model.predict(X[:3], return_std=True)
        >>> mean.shape, std.shape
        ((3,), (3,))
    """

    lengthscale: float | None = None

    def _fixed(self) -> dict[str, Any]:
        return {"particles": 1, "frequencies": 0, "lengthscale": 1.0}

    def embedding(self, dimension: int) -> Embedding:
        if self.lengthscale is not None and not self.lengthscale > 0:
            raise ValueError(f"lengthscale is {self.lengthscale}; give a positive number, or None for √D")
        return Lengthscales(dimension, self.lengthscale)


@dataclass(eq=False, repr=False, kw_only=True)
class DKLRegressor(EmbeddingGP):
    """Deep kernel learning: the SE kernel on one network's latent points; SSDKL with unlabelled inputs.

    It is `DPKLRegressor` with one particle and the closed-form kernel.

    Args:
        hidden: widths of the hidden layers.
        latent_size: d, the size of the latent space.
        lengthscale: ℓ of the kernel in the latent space.
        learn_lengthscale: learn ℓ by marginal likelihood (beyond the paper).

    The others are those of `EmbeddingGP`.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl.regression import DKLRegressor
        >>> X = np.linspace(-2, 2, 20)[:, None]
        >>> model = DKLRegressor(hidden=(16,), lr=0.01, random_state=0).fit(X, X[:, 0])
        >>> model.score(X, X[:, 0]) > 0.5
        True
    """

    hidden: Sequence[int] = (100, 50, 50)
    latent_size: int = 2
    lengthscale: float = 1.0
    learn_lengthscale: bool = False

    def _fixed(self) -> dict[str, Any]:
        return {"particles": 1, "frequencies": 0}

    def embedding(self, dimension: int) -> Embedding:
        return Network((dimension, *self.hidden, self.latent_size))


@dataclass(eq=False, repr=False, kw_only=True)
class DPKLRegressor(DKLRegressor):
    """Deep probabilistic kernel learning (Algorithm 1); SSDPKL with unlabelled inputs (equation 14).

    Args:
        particles: m, the networks that stand for the distribution of weights.
        kernel: `fourier` for random Fourier features, `exact` for the closed form over all pairs.
        n_frequencies: R; the features are 2R.
        prior: k** of a new point: `own` for the model's |μ(x)|², `unit` for the authors' 1.

    The others are those of `DKLRegressor`.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl.regression import DPKLRegressor
        >>> X, more = np.linspace(-2, 2, 20)[:, None], np.linspace(-3, 3, 50)[:, None]
        >>> model = DPKLRegressor(particles=3, hidden=(16,), random_state=0).fit(X, X[:, 0], unlabeled=more)
        >>> model.sample_y(more, n_samples=5).shape
        (50, 5)
    """

    particles: int = 10
    kernel: Literal["fourier", "exact"] = "fourier"
    n_frequencies: int = 100
    prior: Prior = "own"

    def _fixed(self) -> dict[str, Any]:
        if self.kernel not in ("fourier", "exact"):
            raise ValueError(f"kernel is {self.kernel!r}; use 'fourier' or 'exact'")
        if self.kernel == "fourier" and self.n_frequencies < 1:
            raise ValueError(f"n_frequencies is {self.n_frequencies}; give at least 1, or use kernel='exact'")
        return {"frequencies": self.n_frequencies if self.kernel == "fourier" else 0}


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


REGRESSORS: dict[str, type[EmbeddingGP]] = {
    cls.__name__: cls for cls in (GPRegressor, DKLRegressor, DPKLRegressor)
}


def load_regressor(path: str | os.PathLike[str]) -> EmbeddingGP:
    """Read what `save` wrote: the same class and parameters, and the same predictions bit for bit.

    Examples:
        >>> import tempfile, numpy as np
        >>> from fewshot_dpkl.regression import GPRegressor, load_regressor
        >>> model = GPRegressor(epochs=10, random_state=0).fit(np.eye(4), [1.0, 2.0, 3.0, 4.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/gp.safetensors")
        ...     load_regressor(f"{folder}/gp.safetensors")
        GPRegressor(epochs=10, random_state=0)
    """
    return read_regressor(path, REGRESSORS)
