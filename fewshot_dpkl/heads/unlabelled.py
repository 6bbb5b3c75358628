"""Learning from unlabelled examples: one likelihood for them and for the support set.

A head that has learnt from the support set alone has class probabilities p of its own. Here they meet a
mixture of one component per class, in which labelled and unlabelled points have the same density:

    responsibility   r_ic ∝ π_c exp(s_ic) p_ic^β         of class c for the unlabelled point i
    similarity       s_ic = (γ / v) cos(x_i, μ_c)        v: the variance of all points
    class direction  μ_c = Σ_labelled x + T Σ_i w_i a_i r_ic x_i,   a_i = Σ_c r_ic p_ic
    proportions      π_c ∝ Σ_i w_i r_ic + a prior count

a_i is the chance that mixture and head agree on a point, w_i says whether it is of the classes at all
(`distractors.py`). Cosines are those of points centred on the task and divided by what the support set shows
of the scatter within classes. The prior counts follow from the data: where the responsibilities look as those
of even classes do, the prior holds them even and all points give the centre, else the support set gives it
and the proportions are free.

New points are answered one by one: softmax(τ (s + log p + log π)). The temperature τ makes the mean
confidence in the unlabelled points, each left out of its class, the share of right answers to be expected.
All constants were chosen on validation classes (docs/unlabelled.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import Head, State, one_hot, unit
from fewshot_dpkl.heads.distractors import weights_of_unlabeled

SHARPNESS = 14.0  # γ
HEAD = 0.7  # β
TRUST = 3.0  # T
ROUNDS = 10
SCATTER = 30.0  # weight of the scatter within classes against that of all points
CENTRING = 0.8  # how much of the support set's mean is taken off where classes are uneven
COUNTS = (2.0, 100.0)  # prior counts of a class that is one of uneven, of even ones
FIRST_COUNT = 8.0  # before it is known which
UNEVEN = 2.0  # Dirichlet concentration of uneven proportions
EVIDENCE = 0.6  # what a responsibility counts as evidence for either: less than an observed label
WRONG = 2.0  # wrong answers for every point on which mixture and head disagree, with many shots
LEVEL, LEAD, DISAGREE = -1.75, 2.4, -1.12  # log odds of a right answer at one shot, see `expected_accuracy`
OWN = 0.25  # weight of the head's own confidence beside them

OF_UNLABELED = tuple(
    f"unlabeled_{part}" for part in ("centre", "factor", "directions", "log_shares", "temperature")
)
"""What a state holds of unlabelled examples."""


@dataclass(frozen=True)
class Space:
    """Where cosines are taken: x → unit(x) - centre, with the metric P = (I + BᵀB)⁻¹ = I - HᵀH.

    Attributes:
        centre: `[E, 1, D]`.
        factor: H `[E, n, D]`, from the scatter B of the support set within classes; `[E, 0, D]` without one.
    """

    centre: Tensor
    factor: Tensor

    def place(self, features: Tensor) -> Tensor:
        """Points of length one under P, `[E, b, D]`, of features `[E, b, D]`."""
        x = unit(unit(features) - self.centre)
        shrunk = x.square().sum(-1) - (x @ self.factor.mT).square().sum(-1)
        return x * shrunk.clamp_min(1e-12).rsqrt()[..., None]

    def dual(self, vectors: Tensor) -> Tensor:
        """P v of vectors `[E, k, D]`: their product with a point is the inner product under P."""
        return vectors - (vectors @ self.factor.mT) @ self.factor


def support_space(support: Tensor, members: Tensor, everything: Tensor, centre: Tensor) -> Space:
    """The space of a task: support set `[E, n, D]`, `members` `[E, n, C]`, all its points `[E, m, D]`."""
    n, classes = members.shape[1:]
    x = unit(unit(support) - centre)
    if n == classes:
        return Space(centre, x[:, :0])
    means = members.mT @ x / members.sum(1)[..., None]  # E C D
    variance = 1 - unit(unit(everything) - centre).mean(1).square().sum(-1)  # E
    weight = SCATTER / ((n - classes) * variance.clamp_min(1e-6))
    scatter = (x - members @ means) * weight.sqrt()[:, None, None]  # E n D
    gram = scatter @ scatter.mT + torch.eye(n, dtype=x.dtype, device=x.device)
    return Space(centre, torch.linalg.solve_triangular(torch.linalg.cholesky(gram), scatter, upper=False))


@dataclass(frozen=True)
class Fit:
    """What rounds of soft assignment give: `directions` `[E, C, D]`, whose product with a placed point is s,
    `log_shares` `[E, 1, C]` log π, `responsibilities` `[E, u, C]` and `left_out` `[E, u, C]`, the s of the
    unlabelled points to class directions that they have no part in."""

    space: Space
    directions: Tensor
    log_shares: Tensor
    responsibilities: Tensor
    left_out: Tensor


def assign(
    support: Tensor,
    members: Tensor,
    unlabeled: Tensor,
    log_p: Tensor,
    weights: Tensor,
    centre: Tensor,
    count: Tensor,
) -> Fit:
    """Soft assignment of unlabelled points `[E, u, D]`, of which the head says `log_p` `[E, u, C]`.

    `weights` w `[E, u]`, `centre` `[E, 1, D]` of the space and prior `count` `[E]` of a class are given.
    """
    space = support_space(support, members, torch.cat([support, unlabeled], 1), centre)
    labelled, points = space.place(support), space.place(unlabeled)
    mean = torch.cat([labelled, points], 1).mean(1, keepdim=True)
    variance = 1 - (mean * space.dual(mean)).sum(-1, keepdim=True)  # E 1 1
    known, sharpness = members.mT @ labelled, SHARPNESS / variance.clamp_min(1e-6)  # E C D

    def scaled(total: Tensor) -> tuple[Tensor, Tensor]:
        dual = space.dual(total)
        squared = (total * dual).sum(-1).clamp_min(1e-12)  # E C
        return dual * sharpness / squared.sqrt()[..., None], squared

    (towards, _), log_shares = scaled(known), torch.zeros_like(known[:, None, :, 0])
    p = log_p.exp()
    for _ in range(ROUNDS):
        r = (points @ towards.mT + HEAD * log_p + log_shares).softmax(-1)  # E u C
        counts = (weights[..., None] * r).sum(1, keepdim=True) + count[:, None, None]
        log_shares = (counts / counts.sum(-1, keepdim=True)).log()
        part = TRUST * weights[..., None] * r * (r * p).sum(-1, keepdim=True)
        towards, squared = scaled(known + part.mT @ points)
    inner = points @ towards.mT * squared.sqrt()[:, None] / sharpness  # x·μ, μ's squared length
    rest = (squared[:, None] - 2 * part * inner + part.square()).clamp_min(1e-12)
    return Fit(space, towards, log_shares, r, sharpness * (inner - part) / rest.sqrt())


def evenness(counts: Tensor) -> Tensor:
    """The chance `[E]` that counts `[E, C]` are of even classes, not of Dirichlet proportions."""
    seen, classes = counts * EVIDENCE, counts.shape[-1]
    total = seen.sum(-1)
    even = -total * math.log(classes)
    one = torch.full_like(total, UNEVEN)
    uneven = torch.lgamma(classes * one) - torch.lgamma(classes * one + total)
    uneven = uneven + (torch.lgamma(UNEVEN + seen) - torch.lgamma(one)[:, None]).sum(-1)
    return torch.sigmoid(even - uneven)


def learnt_with(head: Head, state: State, support: Tensor, labels: Tensor, unlabeled: Tensor | None) -> State:
    """The `state` that a head has learnt from its support set, with what unlabelled examples add, if any."""
    if unlabeled is None:
        return state
    answer = partial(head.particle_log_proba_episodes, state)
    return {**state, **learn_from_unlabeled(answer, support, labels, unlabeled)}


@torch.no_grad()
def learn_from_unlabeled(
    answer: Callable[[Tensor], Tensor], support: Tensor, labels: Tensor, unlabeled: Tensor
) -> State:
    """What `with_unlabeled` needs to know, learnt from E tasks.

    Args:
        answer: the head's log-probabilities by particle, `[E, u, P, C]` of features `[E, u, D]`.
        support, labels: `[E, n, D]` and `[E, n]`.
        unlabeled: `[E, u, D]`.
    """
    members = one_hot(labels, support.dtype)
    by_particle = answer(unlabeled).to(support)
    log_p = by_particle.logsumexp(2) - math.log(by_particle.shape[2])  # E u C
    weights = weights_of_unlabeled(support, labels, unlabeled)
    free = CENTRING * unit(support).mean(1, keepdim=True)
    low, high = map(math.log, COUNTS)
    count = support.new_full(support.shape[:1], FIRST_COUNT)
    first = assign(support, members, unlabeled, log_p, weights, free, count)
    even = evenness((weights[..., None] * first.responsibilities).sum(1))  # E
    counted = torch.cat([torch.ones_like(labels).to(weights), weights], 1)[..., None]  # E n+u 1
    whole = (counted * unit(torch.cat([support, unlabeled], 1))).sum(1, keepdim=True)
    centre = free + even[:, None, None] * (whole / counted.sum(1, keepdim=True) - free)
    count = (low + even * (high - low)).exp()
    fit = assign(support, members, unlabeled, log_p, weights, centre, count)
    wanted = expected_accuracy(fit, log_p, weights, members.sum(1).reciprocal().mean(-1))
    logits = (fit.left_out + fit.log_shares)[:, :, None] + by_particle  # E u P C
    temperature = matching_temperature(logits, weights, wanted)
    learnt = (fit.space.centre, fit.space.factor, fit.directions, fit.log_shares, temperature)
    return dict(zip(OF_UNLABELED, learnt, strict=True))


def expected_accuracy(fit: Fit, log_p: Tensor, weights: Tensor, inverse_shot: Tensor) -> Tensor:
    """The share of right answers to expect, `[E]`, of points of which the head says `log_p` `[E, u, C]`.

    With many shots it is the mean of two guesses: the head's own confidence, and how often head and mixture
    agree. At one shot (`inverse_shot` `[E]`) neither says much, but how far the most similar class is ahead
    of the second does: as a share of its lead over the mean of all others, and beside what it would be if
    similarities were normal noise. Two classes have no such second.
    """
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-12)
    number, classes = log_p.shape[1:]

    def mean(values: Tensor) -> Tensor:
        return (weights * values).sum(1)

    disagree = mean((fit.responsibilities.argmax(-1) != log_p.argmax(-1)).to(log_p))
    own = mean(log_p.exp().amax(-1))
    expected = (own + 1 - WRONG * disagree) / 2
    if classes > 2:
        best, second = (fit.left_out + fit.log_shares).topk(2).values.unbind(-1)
        top = fit.left_out.amax(-1)
        others = (fit.left_out.sum(-1) - top) / (classes - 1)
        lead = mean(best - second) / mean(top - others).clamp_min(1e-6)
        highest, next_highest = (
            torch.special.ndtri(torch.tensor((classes - k - 0.375) / (classes + 0.25))).item() for k in (0, 1)
        )
        noise = (highest - next_highest) * (classes - 1) / (highest * classes)
        rare = ((number * disagree + 1) / (number + 2)).log()
        odds = LEVEL + LEAD * (lead - noise) / (1 - noise) + DISAGREE * rare
        expected = expected + inverse_shot * ((1 - OWN) * odds.sigmoid() + OWN * own - expected)
    return expected.clamp(1.05 / classes, 0.999)


def matching_temperature(logits: Tensor, weights: Tensor, wanted: Tensor, steps: int = 30) -> Tensor:
    """τ `[E, 1, 1, 1]`, by which the mean confidence in the unlabelled points is the `wanted` `[E]`.

    By bisection. `logits` `[E, u, P, C]` are to be multiplied by τ, points have `weights` `[E, u]`.
    """
    low, high = torch.full_like(wanted, -5), torch.full_like(wanted, 2)
    for _ in range(steps):
        middle = (low + high) / 2
        confidence = (logits * middle.exp()[:, None, None, None]).softmax(-1).mean(2).amax(-1)
        below = (weights * confidence).sum(1) < wanted * weights.sum(1)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return middle.exp()[:, None, None, None]


def with_unlabeled(state: State, query: Tensor, by_particle: Tensor) -> Tensor:
    """A head's answers `[E, q, P, C]` to `query` `[E, q, D]`, with what unlabelled examples have taught.

    They stay as they are, to the bit, where the head has learnt from a support set alone.
    """
    if "unlabeled_directions" not in state:
        return by_particle
    centre, factor, directions, log_shares, temperature = (state[name] for name in OF_UNLABELED)
    similarity = Space(centre, factor).place(query) @ directions.mT + log_shares  # E q C
    return (temperature * (similarity[:, :, None] + by_particle)).log_softmax(-1)
