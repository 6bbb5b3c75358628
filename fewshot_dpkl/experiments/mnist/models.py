"""BLR, BNN, DBLR and DPKL as the paper sets them for MNIST, from the same heads as few-shot learning.

A trial is an episode: `[T, n, 784]` training digits, judged by `[T, v, 784]` validation digits. All four
take a softmax of cosines (or of its kernel form): digits, embeddings and class weights of unit length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, unit
from fewshot_dpkl.heads.bayesian import BLRHead, BNNHead
from fewshot_dpkl.heads.dpkl import DBLRHead, DPKLHead
from fewshot_dpkl.heads.training.particle import embed
from fewshot_dpkl.kernels import mean_embedding, random_frequencies

LATENT, FREQUENCIES, BATCH, EPOCHS = 64, 640, 32, 100
LENGTHSCALES = tuple(precision**-0.5 for precision in (10, 20, 50))  # at 1/ℓ² = 1 no probability passes 0.45
PAPER = ("blr", "bnn", "dblr", "dpkl")
SETTINGS = {  # of every run, for its results
    "hidden": LATENT,
    "frequencies": FREQUENCIES,
    "batch_size": BATCH,
    "epochs": EPOCHS,
    "lengthscales": [round(scale, 4) for scale in LENGTHSCALES],
}
DEFAULT = (*PAPER, "dpkl-lengthscale")
# Beyond the paper: plain logits, and the authors' sign of SVGD's kernel gradient (particles attract).
MODELS = (*DEFAULT, "blr-plain", "bnn-plain", *(f"{model}-attract" for model in PAPER))


def make_heads(model: str, seed: int = 0, epochs: int = EPOCHS) -> list[Head]:
    """The candidates of a model, one but for `dpkl-lengthscale`; `seed` is that of the frequencies."""
    if model not in MODELS:
        raise ValueError(f"there is no model {model!r}; choose from {', '.join(MODELS)}")
    name, _, variant = model.partition("-")
    common: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": epochs,
        "repulsion": -1.0 if variant == "attract" else 1.0,
    }
    if name == "blr":
        return [BLRHead(cosine=variant != "plain", **common)]
    if name == "bnn":
        return [BNNHead(latent=LATENT, cosine=variant != "plain", **common)]
    # n may exceed the 784 pixels, so there is no span to gain: every size is trained in all dimensions.
    # And all of a particle moves, so κ is looked at in every step.
    layer: dict[str, Any] = {"latent": LATENT, "span": False, "start": "normal", "kappa_every": 1, **common}
    if name == "dblr":
        return [DBLRHead(**layer)]
    if variant == "lengthscale":  # random features are too coarse for short lengthscales
        return [DPKLHead(kernel="exact", lengthscale=scale, **layer) for scale in LENGTHSCALES]
    return [DPKLHead(frequencies=FREQUENCIES, rotation="uniform", frequency_seed=seed, **layer)]


@dataclass(frozen=True)
class Fitted:
    """Some of the trials and what their head has learnt."""

    trials: Tensor  # their numbers
    head: Head
    state: State

    def log_proba(self, digits: Tensor) -> Tensor:
        """log p `[T, q, 10]` of digits `[q, 784]`, the same for every trial, or `[T, q, 784]`."""
        own = digits if digits.dim() == 3 else digits.expand(len(self.trials), -1, -1)
        return self.head.log_proba_episodes(self.state, own)


@torch.no_grad()
def fit_trials(
    heads: Sequence[Head],
    training: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    seeds: Sequence[int],
    on_check: Callable[[int], None] | None = None,
) -> list[Fitted]:
    """Train every candidate on all trials at once; each trial keeps that with the best validation likelihood.

    Args:
        training: digits `[T, n, 784]` and labels `[T, n]`.
        validation: digits `[T, v, 784]` and labels `[T, v]`.
        seeds: T integers.
        on_check: called every 10 epochs of every candidate.
    """
    trials = torch.arange(len(seeds))
    fitted = []
    for head in heads:
        state = head.fit_episodes(*training, seeds, validation=validation, on_check=on_check)  # type: ignore[call-arg]
        fitted.append(Fitted(trials, head, state))
    if len(heads) == 1:
        return fitted
    losses = [mean_nll(candidate.log_proba(validation[0]), validation[1]) for candidate in fitted]
    chosen = torch.stack(losses).argmin(0).cpu()  # T
    return [
        Fitted(trials[chosen == c], candidate.head, {k: v[chosen == c] for k, v in candidate.state.items()})
        for c, candidate in enumerate(fitted)
        if (chosen == c).any()
    ]


def mean_nll(log_p: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log likelihood `[T]` of labels `[T, q]` under log p `[T, q, C]`."""
    return -log_p.gather(-1, labels[..., None]).mean((1, 2))


@torch.no_grad()
def score(
    fitted: Sequence[Fitted], digits: Tensor, labels: Tensor, chunk: int = 200
) -> tuple[Tensor, Tensor]:
    """Error in percent `[T]` and mean NLL `[T]` on the test digits `[q, 784]` with labels `[q]`.

    `chunk` digits at a time: ten trials of ten particles make 100 embeddings of every digit.
    """
    trials = sum(len(part.trials) for part in fitted)
    wrong, loss = torch.zeros(trials, dtype=torch.float64), torch.zeros(trials, dtype=torch.float64)
    for part in fitted:
        for x, y in zip(digits.split(chunk), labels.split(chunk), strict=True):
            log_p, truth = part.log_proba(x), y.expand(len(part.trials), -1)
            wrong[part.trials] += (log_p.argmax(-1) != truth).sum(1).cpu()
            loss[part.trials] += mean_nll(log_p.double(), truth).cpu() * len(y)
    return 100 * wrong / len(labels), loss / len(labels)


@torch.no_grad()
def mean_embedding_of(fitted: Fitted, digits: Tensor, seed: int = 0, chunk: int = 200) -> Tensor:
    """The first trial's mean random-feature embedding μ `[q, 2R]` of digits `[q, 784]`."""
    frequencies = random_frequencies(
        LATENT, FREQUENCIES, orthogonal=True, generator=torch.Generator().manual_seed(seed)
    ).to(digits)
    weights = fitted.state["weights"][:1]
    bags = (embed(unit(x)[None], weights)[0].transpose(0, 1) for x in digits.split(chunk))  # m q d
    return torch.cat([mean_embedding(bag, frequencies) for bag in bags])
