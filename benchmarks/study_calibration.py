"""What makes DPKL accurate and its probabilities trustworthy on frozen features.

    python benchmarks/study_calibration.py --features val.npz --base base.npz

Prints the table of docs/calibration.md. Runs on episodes of *validation* classes, all variants on the same
ones; never give it novel classes. The first line is what the differences are paired with. `--base` (features
of base classes) adds the variants that learn a preparation of the features there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fewshot_dpkl import DPKL, DPKLHead, EpisodeSampler, FeatureSet, Head, HeadResult, evaluate, make_head
from fewshot_dpkl.evaluation.calibration import fit_lengthscale
from fewshot_dpkl.evaluation.evaluator import paired_difference
from fewshot_dpkl.heads.base import State, one_hot, unit
from fewshot_dpkl.heads.calibrated import (
    TYPICAL,
    CalibratedDPKLHead,
    class_means,
    squared_distances_to_means,
)
from fewshot_dpkl.heads.span import support_span
from fewshot_dpkl.heads.training.draws import Draws
from fewshot_dpkl.heads.training.layers import Points
from fewshot_dpkl.heads.training.particle import Training
from fewshot_dpkl.heads.training.similarity import FreeClassWeights


class IdentityLayers(Head):
    """Gaussian classes seen through m linear layers x + xW_l that start near the identity, W_l in the span.

    `trained` steps of gradient descent on the leave-one-out likelihood of the support set move the layers.
    """

    name = "identity layers"

    def __init__(self, precision: float, noise: float, layers: int = 10, trained: int = 0) -> None:
        self.precision, self.noise, self.layers, self.trained = precision, noise, layers, trained

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        span = support_span(unit(support))
        points, r = span.coordinates, span.coordinates.shape[-1]
        drawn = torch.stack([Draws(seed).normal(self.layers, r, r) for seed in seeds])
        layers = torch.eye(r) + drawn * (self.noise * r**-0.5)  # E m r r
        for _ in range(self.trained):
            layers = self._step(layers, points, labels)
        assert span.basis is not None
        return {"basis": span.basis, "layers": layers, "means": class_means(points, labels)}

    @torch.enable_grad()
    def _step(self, layers: Tensor, points: Tensor, labels: Tensor) -> Tensor:
        layers = layers.detach().requires_grad_()
        seen = (points[:, None] @ layers).flatten(0, 1)  # Em n r
        repeated = labels.repeat_interleave(self.layers, 0)
        distances, _ = squared_distances_to_means(seen, repeated)
        log_p = (-self.precision / 2 * distances).log_softmax(-1)
        loss = -(log_p * one_hot(repeated, log_p.dtype)).sum()
        return (layers - 0.001 * torch.autograd.grad(loss, layers)[0]).detach()

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        inside = unit(query) @ state["basis"].transpose(-1, -2)  # E q r
        z, theta = (
            inside[:, None] @ state["layers"],
            state["means"][:, None] @ state["layers"],
        )  # E m q r, E m C r
        distances = torch.cdist(z, theta).square()
        return (-self.precision / 2 * distances).logsumexp(1).log_softmax(-1)


class Bootstrap(Head):
    """Gaussian classes whose P particles are Bayesian-bootstrap means of the class."""

    name = "bootstrap"

    def __init__(self, precision: float, particles: int = 10) -> None:
        self.precision, self.particles = precision, particles

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        members = one_hot(labels, support.dtype)  # E n C
        drawn = torch.stack([Draws(seed).uniform(self.particles, labels.shape[1]) for seed in seeds])
        weights = -drawn.clamp_min(1e-9).log()[:, :, None] * members.transpose(-1, -2)[:, None]  # E P C n
        return {"means": weights / weights.sum(-1, keepdim=True) @ unit(support)[:, None]}

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        means = state["means"]  # E P C D
        scores = torch.einsum("eqd,epcd->epqc", unit(query), means) - means.square().sum(-1)[:, :, None] / 2
        return (scores * self.precision).log_softmax(-1).logsumexp(1) - math.log(self.particles)


class TwoLevels(DPKLHead):
    """The paper's head behind relu(xA) with one random A `[D, 512]`: two levels, the first not trained."""

    name = "two levels"

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int], *_: object) -> State:
        return super().fit_episodes(self._first(support), labels, seeds)

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        return super().log_proba_episodes(state, self._first(query))

    def _first(self, features: Tensor) -> Tensor:
        return (unit(features) @ Draws(0).normal(features.shape[-1], 512)).relu_()


class LearntInTheLoop(CalibratedDPKLHead):
    """ℓ ascends the marginal likelihood of the support labels, two steps of SVGD and one of ℓ in turn.

    The marginal likelihood is that of the particles' mean, Π_i mean_p ρ_i^p, with the prior of
    `leave_one_out_precision`. A point has a part in the class weights that judge it, so ℓ comes out short.
    """

    name = "learnt in the loop"

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        span = support_span(unit(support))
        points = span.coordinates
        n, shot = points.shape[1], points.shape[1] / (int(labels.max()) + 1)
        means = class_means(points, labels)[:, None]  # E 1 C r
        log_precision = torch.full((len(points),), math.log(TYPICAL))
        noise = torch.stack([Draws(seed).normal(self.particles, *means.shape[2:]) for seed in seeds])
        theta = means + noise * (self.diversity * (TYPICAL * points.shape[-1]) ** -0.5)  # E P C r
        for _ in range(self.steps // 2):
            scale = (log_precision / 2).exp()[:, None, None]
            theta = Training(
                Points(points * scale), labels, theta * scale[..., None], FreeClassWeights(),
                torch.arange(n).expand(len(points), 2, -1), batch_size=n,
                learning_rate=self.learning_rate / (shot + self.prior), prior=self.prior / 2,
                prior_mean=means * scale[..., None], check_every=2, optimizer="sgd",
            ).run().theta / scale[..., None]  # fmt: skip
            log_precision = self._ascend(log_precision, points, labels, theta)
        class_weights = (span.to_features(theta.flatten(1, 2).mT)).mT.unflatten(1, theta.shape[1:3])
        scale = (log_precision / 2).exp()[:, None, None]
        return {"class_weights": class_weights * scale[..., None], "scale": scale}

    @torch.enable_grad()
    def _ascend(self, log_precision: Tensor, points: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
        log_precision = log_precision.requires_grad_()
        scores = torch.einsum("enr,epcr->enpc", points, theta) - theta.square().sum(-1)[:, None] / 2
        log_rho = (scores * log_precision.exp()[:, None, None, None]).log_softmax(-1)
        own = log_rho.gather(-1, labels[:, :, None, None].expand(-1, -1, self.particles, 1))  # E n P 1
        prior = -0.5 * ((log_precision - math.log(TYPICAL)) / 0.5).square()
        evidence = own.logsumexp(2).sum((1, 2)) + prior  # E, up to a constant
        return (log_precision + 0.05 * torch.autograd.grad(evidence.sum(), log_precision)[0]).detach()


def variants(fitted: dict[str, float], shot: int) -> dict[str, Callable[[], Head]]:
    """Name to head; `fitted` is the lengthscale of the features."""
    precision = 1 / (fitted["spread"] + fitted["shot_noise"] / shot)

    def calibrated(**changed: float) -> Callable[[], Head]:
        return lambda: DPKL("calibrated", **{**fitted, **changed})

    def paper(**changed: object) -> Callable[[], Head]:
        return lambda: DPKLHead(**{"kernel": "exact", **changed})  # type: ignore[arg-type]

    return {
        "calibrated": calibrated(),
        "class means alone, no SVGD": calibrated(particles=1, diversity=0.0, learning_rate=1e-9, steps=1),
        "30 particles of class weights": calibrated(particles=30),
        "3 times the diversity": calibrated(diversity=3.0),
        "150 steps": calibrated(steps=150),
        "prior of 2 examples": calibrated(prior=2.0),
        "prior of 10 examples": calibrated(prior=10.0),
        "prior of as many examples as there are": calibrated(prior=float(shot)),
        "lengthscale by leave-one-out on the support set": lambda: DPKL("calibrated"),
        "lengthscale by marginal likelihood in the particle loop": LearntInTheLoop,
        "class means of unit length": lambda: make_head("centroid", scale=precision * 0.7),
        "particles from the Bayesian bootstrap": lambda: Bootstrap(precision),
        "10 layers near the identity (0.1)": lambda: IdentityLayers(precision, 0.1),
        "10 layers near the identity (0.3)": lambda: IdentityLayers(precision, 0.3),
        "1 layer from the identity, trained by leave-one-out": lambda: IdentityLayers(precision, 0.0, 1, 20),
        "10 layers (0.1), trained by leave-one-out": lambda: IdentityLayers(precision, 0.1, 10, 20),
        "logistic regression": lambda: make_head("logreg"),
        "paper, closed form": paper(),
        "paper, 1/ℓ² = 10": paper(lengthscale=10**-0.5),
        "paper, 1 particle of layers": paper(embeddings=1),
        "paper, 20 particles of layers": paper(embeddings=20),
        "paper, two levels": lambda: TwoLevels(kernel="exact"),
        "paper, whole support set per step": paper(batch_size=25),
        "paper, 30 epochs": paper(epochs=30),
        "paper, the last parameters instead of the best": paper(check_every=100),
        "paper, a look at the error every epoch": paper(check_every=1),
        "paper, momentum at 0.1": paper(optimizer="momentum", learning_rate=0.1),
        "paper, Liu and Wang's bandwidth": paper(bandwidth="liu-wang"),
    }


def prepared(features: FeatureSet, base: FeatureSet) -> dict[str, FeatureSet]:
    """The features after preparations learnt on base classes."""
    table, centre = (np.asarray(f.features, np.float32) for f in (features, base))

    def of(rows: np.ndarray) -> FeatureSet:
        return FeatureSet(rows, features.labels, features.class_names, features.card)

    length = np.linalg.norm(table, axis=1, keepdims=True)
    unit_centre = (centre / np.linalg.norm(centre, axis=1, keepdims=True)).mean(0)
    return {
        "calibrated, centred on the base classes": of(table / length - unit_centre),
        "calibrated, square roots of the features": of(np.sqrt(table.clip(0))),
    }


def line(name: str, result: HeadResult, first: HeadResult) -> str:
    accuracy, interval = paired_difference(result, first)
    nll, nll_interval = paired_difference(result, first, "nll")
    return (
        f"| {name} | {100 * result.accuracy.mean():.2f} | {100 * accuracy:+.2f} ± {100 * interval:.2f} "
        f"| {result.nll.mean():.3f} | {nll:+.3f} ± {nll_interval:.3f} | {result.ece:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True, help="features of validation classes")
    parser.add_argument("--base", type=Path, help="features of base classes")
    parser.add_argument("--shot", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--only", default="", help="run the variants whose name has this in it")
    parser.add_argument("--seed", type=int, default=1, help="not that of the results (default: %(default)s)")
    arguments = parser.parse_args()
    features = FeatureSet.load(arguments.features)

    def run(head: Head, on: FeatureSet) -> HeadResult:
        sampler = EpisodeSampler(on, shot=arguments.shot, seed=arguments.seed)
        return evaluate({"head": head}, on, sampler, arguments.episodes)["head"]

    fitted = fit_lengthscale(features)
    heads = variants(fitted, arguments.shot)
    print(f"spread {fitted['spread']:.4f} shot_noise {fitted['shot_noise']:.4f}")
    print("| variant | accuracy | difference | NLL | difference | ECE |\n|---|---|---|---|---|---|")
    first = run(heads["calibrated"](), features)
    for name, make in tqdm(heads.items(), disable=None):
        if arguments.only in name or name == "calibrated":
            print(line(name, run(make(), features), first), flush=True)
    for name, changed in (
        prepared(features, FeatureSet.load(arguments.base)).items() if arguments.base else ()
    ):
        print(line(name, run(DPKL("calibrated", **fit_lengthscale(changed)), changed), first), flush=True)


if __name__ == "__main__":
    main()
