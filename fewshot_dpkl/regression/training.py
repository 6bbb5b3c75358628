"""Training of the model behind GP, DKL and DPKL: all trials of one size as one batch.

Trials are independent: each has its own generator, and no sum runs over trials, so that a trial's result
does not depend on what it is batched with, up to the rounding of batched float32 matrix products (which
50 steps of Nadam turn into about 1e-3 of the error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewshot_dpkl.kernels import random_frequencies
from fewshot_dpkl.parallel import stop_if_unwanted
from fewshot_dpkl.particles import functional_gradient
from fewshot_dpkl.regression.embeddings import Embedding
from fewshot_dpkl.regression.gp import Posterior, gaussian_nll
from fewshot_dpkl.regression.model import Model, Prior
from fewshot_dpkl.regression.unlabelled import total_variance


@dataclass(eq=False, kw_only=True)
class Schedule:
    """How a model is trained; the defaults are the paper's (appendix C.1)."""

    noise: float = 1.0
    alpha: float = 1.0
    epochs: int = 50
    lr: float = 1e-3
    validation_fraction: float = 0.1
    check_every: int = 10
    use_validation: bool = False
    learn_noise: bool = False
    hyper_lr: float = 0.05


@dataclass(kw_only=True)
class Settings(Schedule):
    """The schedule and the model that is trained by it."""

    particles: int = 10
    frequencies: int = 100  # R; 0 for the closed-form kernel
    lengthscale: float = 1.0
    learn_lengthscale: bool = False
    prior: Prior = "own"  # k** = |μ(x)|², or "unit": 1 as in the authors' code


def initial_model(embedding: Embedding, settings: Settings, seeds: Sequence[int], latent_size: int) -> Model:
    """Starting models for the trials of `seeds`, each from its own generator."""
    parameters, frequencies = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        parameters.append(embedding.initial(settings.particles, generator))
        if settings.frequencies:
            frequencies.append(random_frequencies(latent_size, settings.frequencies, generator=generator))
    trials = torch.ones(len(seeds))
    return Model(
        embedding,
        torch.stack(parameters),
        trials * torch.tensor(settings.lengthscale).log(),
        trials * torch.tensor(settings.noise).log(),
        torch.stack(frequencies) if frequencies else None,
        settings.prior,
    )


def backward(model: Model, x: Tensor, y: Tensor, unlabeled: Tensor | None, alpha: float) -> Tensor:
    """Accumulate the gradient of the loss in the leaves of `model`; returns the loss of each trial `[T]`.

    The loss is L (equation 7), or with unlabelled inputs L / n + α / n_u Σ σ²(x) (equation 14). L in
    float64, the networks in the dtype of their parameters.
    """
    embedded = model.embed(x).double()
    posterior = model.condition(embedded, y)
    loss = posterior.nll
    if unlabeled is not None:
        variance = total_variance(model, embedded, posterior, unlabeled) / unlabeled.shape[-2]
        loss = loss / x.shape[-2] + alpha * variance
    loss.sum().backward()
    return loss.detach()


@dataclass(frozen=True)
class Trained:
    """T models conditioned on their labelled points, for inputs and targets already standardised."""

    model: Model  # float64
    embedded: Tensor  # T n 2R, or T m n d
    posterior: Posterior
    history: Tensor  # checks × T validation errors (empty without validation points)

    def cpu(self) -> Trained:
        posterior = replace(
            self.posterior,
            coefficients=self.posterior.coefficients.cpu(),
            factor=self.posterior.factor.cpu(),
            nll=self.posterior.nll.cpu(),
        )
        return Trained(self.model.to("cpu"), self.embedded.cpu(), posterior, self.history.cpu())

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y (noise included), each `[T, q]`, at inputs `[T, q, D]`."""
        new = self.model.embed(x.double())
        rows = self.model.rows(self.posterior, new, self.embedded)
        variance = self.posterior.variance(rows, self.model.prior_variance(new)).clamp_min(0)
        return self.posterior.mean(rows), variance + self.model.log_noise.exp().unsqueeze(-1)

    @torch.no_grad()
    def covariance(self, x: Tensor) -> Tensor:
        """Joint covariance of y (noise included) at inputs `[T, q, D]`: `[T, q, q]`."""
        new = self.model.embed(x.double())
        rows = self.model.rows(self.posterior, new, self.embedded)
        whitened = torch.linalg.solve_triangular(self.posterior.factor, rows.transpose(-1, -2), upper=False)
        form = whitened.transpose(-1, -2) @ whitened  # T q q
        kernel = self.model.kernel(new, new)
        diagonal = self.model.prior_variance(new) - kernel.diagonal(
            dim1=-2, dim2=-1
        )  # 0 but for a unit prior
        diagonal = diagonal + self.model.log_noise.exp().unsqueeze(-1)
        return (form if self.posterior.weight_space else kernel - form) + torch.diag_embed(diagonal)


@torch.no_grad()
def condition(model: Model, x: Tensor, y: Tensor, history: Sequence[Tensor] = ()) -> Trained:
    """Condition trained models on labelled points in float64."""
    model = model.to(torch.float64)
    embedded = model.embed(x.double())
    errors = torch.stack(list(history)) if history else y.new_zeros(0, y.shape[0])
    posterior = model.condition(embedded, y.double())
    # what only training needs goes; the factor as a file will hold it, so that saving changes no bit
    posterior = replace(posterior, inverse=None, matrix=None, factor=posterior.factor.contiguous())
    return Trained(model, embedded.contiguous(), posterior, errors)


@torch.no_grad()
def validation_error(
    model: Model, x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, likelihood: bool
) -> Tensor:
    """What chooses the epoch, at the validation points: root mean squared error `[T]`, or mean NLL `[T]`."""
    embedded, new = model.embed(x).double(), model.embed(x_val).double()
    posterior = model.condition(embedded, y)
    rows = model.rows(posterior, new, embedded)
    mean = posterior.mean(rows)
    if not likelihood:
        return (mean - y_val).square().mean(-1).sqrt()
    variance = posterior.variance(rows, model.prior_variance(new)).clamp_min(0)
    return gaussian_nll(y_val, mean, variance + model.log_noise.double().exp().unsqueeze(-1)).mean(-1)


def train(model: Model, x: Tensor, y: Tensor, unlabeled: Tensor | None, settings: Settings) -> Trained:
    """Algorithm 1 with Nadam, full batch, keeping each trial's best validation error (`validation_error`).

    The last ⌊fraction · n⌋ rows of every trial are its validation points (the caller shuffles); with none,
    the last epoch is kept. The prediction is conditioned on the other rows alone, as in the paper, or on
    all n with `use_validation`.

    Args:
        model: from `initial_model`, on the device of the data.
        x: `[T, n, D]` standardised inputs, float32.
        y: `[T, n]` standardised targets, float64.
        unlabeled: `[T, n_u, D]`, or None.
    """
    n_val = int(settings.validation_fraction * x.shape[1])
    n_fit = x.shape[1] - n_val
    x_fit, y_fit, x_val, y_val = x[:, :n_fit], y[:, :n_fit], x[:, n_fit:], y[:, n_fit:]
    parameters = model.parameters.clone().requires_grad_()
    lengthscale = model.log_lengthscale.clone().requires_grad_(settings.learn_lengthscale)
    noise = model.log_noise.clone().requires_grad_(settings.learn_noise)
    live = replace(model, parameters=parameters, log_lengthscale=lengthscale, log_noise=noise)
    groups = [{"params": [parameters], "lr": settings.lr}]
    hyper = [tensor for tensor in (lengthscale, noise) if tensor.requires_grad]
    if hyper:
        groups.append({"params": hyper, "lr": settings.hyper_lr})
    optimizer = torch.optim.NAdam(groups)
    best = live.to(parameters.dtype)
    least = torch.full_like(y[:, 0], torch.inf)
    history: list[Tensor] = []
    for epoch in range(1, settings.epochs + 1):
        stop_if_unwanted()
        optimizer.zero_grad()
        loss = backward(live, x_fit, y_fit, unlabeled, settings.alpha)
        if not torch.isfinite(loss).all():
            raise ValueError(f"training diverged at epoch {epoch}: lower lr, or look for extreme inputs")
        assert parameters.grad is not None
        parameters.grad = functional_gradient(parameters, parameters.grad)
        optimizer.step()
        if n_val and (epoch % settings.check_every == 0 or epoch == settings.epochs):
            # a learnt noise can shrink until the model is sure of what it does not know, which no RMSE shows
            history.append(
                validation_error(live, x_fit, y_fit, x_val, y_val, likelihood=settings.learn_noise)
            )
            better = history[-1] < least
            least = torch.where(better, history[-1], least)
            best = _where(better, live, best)
    kept = best if n_val else live
    return (
        condition(kept, x, y, history) if settings.use_validation else condition(kept, x_fit, y_fit, history)
    )


@torch.no_grad()
def _where(choose: Tensor, a: Model, b: Model) -> Model:
    """Trial by trial, the learnt values of `a` where `choose` `[T]`, else those of `b`."""
    return replace(
        b,
        parameters=torch.where(choose[:, None, None], a.parameters, b.parameters),
        log_lengthscale=torch.where(choose, a.log_lengthscale, b.log_lengthscale),
        log_noise=torch.where(choose, a.log_noise, b.log_noise),
    )
