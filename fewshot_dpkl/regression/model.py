"""The one model behind GP, DKL and DPKL: an exact GP on embedded inputs, for a batch of trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fewshot_dpkl.kernels import mean_embedding, mean_embedding_kernel, squared_exponential
from fewshot_dpkl.regression.embeddings import Embedding
from fewshot_dpkl.regression.gp import Posterior, condition_on_features, condition_on_kernel

Prior = Literal["own", "unit"]


@dataclass(frozen=True)
class Model:
    """T models: parameters `[T, m, P]`, log ℓ `[T]`, log σ² `[T]`, frequencies `[T, R, d]` or None."""

    embedding: Embedding
    parameters: Tensor
    log_lengthscale: Tensor
    log_noise: Tensor
    frequencies: Tensor | None
    prior: Prior

    def to(self, where: torch.dtype | torch.device | str) -> Model:
        """A detached copy in another dtype or on another device."""
        frequencies = None if self.frequencies is None else self.frequencies.to(where)
        tensors = (self.parameters, self.log_lengthscale, self.log_noise)
        parameters, log_lengthscale, log_noise = (tensor.detach().to(where) for tensor in tensors)
        return Model(self.embedding, parameters, log_lengthscale, log_noise, frequencies, self.prior)

    def latent(self, inputs: Tensor) -> Tensor:
        """g_w(x) / ℓ for inputs `[T, n, D]`: `[T, m, n, d]`."""
        return self.embedding(self.parameters, inputs) / self.log_lengthscale.exp()[:, None, None, None]

    def embed(self, inputs: Tensor) -> Tensor:
        """What the kernel is computed from: μ(x) `[T, n, 2R]`, or the latent points `[T, m, n, d]`."""
        latent = self.latent(inputs)
        return latent if self.frequencies is None else mean_embedding(latent, self.frequencies.unsqueeze(1))

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        """K between embedded points (equation 2): `[T, n, k]`."""
        return mean_embedding_kernel(a, b) if self.frequencies is None else a @ b.transpose(-1, -2)

    def prior_variance(self, embedded: Tensor) -> Tensor:
        """k** of embedded points: `[T, n]`."""
        if self.prior == "unit":
            return embedded.new_ones(embedded.shape[0], embedded.shape[-2])
        if self.frequencies is not None:
            return embedded.square().sum(-1)
        bags = embedded.transpose(1, 2)  # T n m d
        return squared_exponential(bags, bags).mean((-1, -2))

    def condition(self, embedded: Tensor, y: Tensor) -> Posterior:
        """The posterior given n labelled points, in the smaller of the two spaces."""
        noise = self.log_noise.exp().to(y.dtype)
        if self.frequencies is not None and embedded.shape[-2] > embedded.shape[-1]:  # n > 2R
            return condition_on_features(embedded, y, noise)
        return condition_on_kernel(self.kernel(embedded, embedded), y, noise)

    def rows(self, posterior: Posterior, embedded: Tensor, labelled: Tensor) -> Tensor:
        """How new embedded points enter `posterior`: their features, or their kernel with the labelled."""
        return embedded if posterior.weight_space else self.kernel(embedded, labelled)
