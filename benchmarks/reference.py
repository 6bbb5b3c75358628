"""Reference loops: the models as one would first write them.

One episode at a time, a Python loop over the particles, all D dimensions, autograd, torch's optimisers.
Written for clarity; the tests hold the fast heads to it and the benchmark measures them against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot, relu

from fewshot_dpkl.heads.training.draws import Draws, sign_weights, uniform_weights


def features(z: Tensor, frequencies: Tensor) -> Tensor:
    """Random Fourier features `[b, 2R]` of points `[b, d]`."""
    phase = z @ frequencies.T
    return torch.cat([torch.cos(phase), torch.sin(phase)], -1) / len(frequencies) ** 0.5


def squared_exponential(z: Tensor, theta: Tensor) -> Tensor:
    """k between rows of z `[b, d]` and theta `[C, d]` at ℓ = 1: `[b, C]`."""
    return torch.exp(-(torch.cdist(z, theta, compute_mode="donot_use_mm_for_euclid_dist") ** 2) / 2)


def particle_kernel(flat: Tensor) -> tuple[Tensor, Tensor]:
    """κ `[m, m]` and the bandwidth h of particles `[m, p]`, median heuristic."""
    m = len(flat)
    if m == 1:
        return flat.new_ones(1, 1), flat.new_ones(())
    products = flat @ flat.T
    squares = products.diag()[:, None] + products.diag() - 2 * products
    squares.fill_diagonal_(0)
    h = squares[torch.triu_indices(m, m, 1).unbind()].quantile(0.5) / math.log(m)
    return torch.exp(-squares / h), h


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).flatten(1)


def probabilities(
    x: Tensor, weights: list[Tensor], thetas: list[Tensor], frequencies: Tensor | None
) -> list[Tensor]:
    """ρ^p of every class-weight particle: m tensors `[b, C]`; by random features if `frequencies` are given.

    Points pass through the features once, not once for each of the class weights they are compared with.
    """
    embeddings = [normalize(relu(x @ w), dim=-1) for w in weights]
    if frequencies is not None:
        mean_embedding = torch.stack([features(z, frequencies) for z in embeddings]).mean(0)
    result = []
    for theta in thetas:
        unit = normalize(theta, dim=-1)
        if frequencies is None:
            k = torch.stack([squared_exponential(z, unit) for z in embeddings]).mean(0)
        else:
            k = mean_embedding @ features(unit, frequencies).T
        k = torch.where(k > 0.01, k, 0.01 * torch.exp(k / 0.01 - 1))  # random features can be negative
        result.append(k / k.sum(-1, keepdim=True))
    return result


def dpkl(
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    seed: int,
    *,
    frequencies: Tensor | None = None,
    frequencies_per_step: int | None = None,
    embeddings: int = 10,
    particles: int = 10,
    latent: int = 128,
    epochs: int = 100,
    batch_size: int = 5,
    learning_rate: float = 1e-3,
    prior: float = 1e-3,
    kappa_every: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> Tensor:
    """Fit DPKL (DBLR with `embeddings=1`) to one episode; class probabilities of the queries `[q, C]`.

    The paper's algorithm as it stands; the closed form, or random features with `frequencies` `[R, d]`. Two
    things can be made cheaper as in our heads: a step that looks at a block of the frequencies only, the next
    step at the next, and κ, looked at once in some steps.
    """
    n, features = support.shape
    classes = int(labels.max()) + 1
    draws = Draws(seed)
    deviation = (2 / (features + latent)) ** 0.5
    draw = sign_weights if features >= 2 * latent else uniform_weights  # `latent` is a power of two here
    drawn = draw(draws.stream(), (features, embeddings, latent), deviation).to(support)
    weights = [weight.contiguous() for weight in drawn.unbind(1)]
    thetas = list(draws.normal(particles, classes, latent).to(support) * latent**-0.5)
    orders = draws.orders(epochs, n)
    x, y = normalize(support, dim=-1), one_hot(labels, classes)
    optimise = optimizer([*weights, *thetas], lr=learning_rate)  # type: ignore[call-arg]
    best: tuple[float, float] = (math.inf, math.inf)
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    blocks = [None] if frequencies is None else frequencies.split(frequencies_per_step or len(frequencies))
    step = 0

    for epoch in range(epochs):
        for batch in orders[epoch].split(batch_size):
            step += 1
            for tensor in (*weights, *thetas):
                tensor.requires_grad_()
            rho = probabilities(x[batch], weights, thetas, blocks[step % len(blocks)])
            of_truth = [(r * y[batch]).sum(-1) for r in rho]
            loss = -torch.stack(of_truth).mean(0).log().mean()
            weight_grads = torch.autograd.grad(loss, weights, retain_graph=True)
            scores = []
            for theta, r in zip(thetas, of_truth, strict=True):
                log_posterior = n / len(batch) * r.log().sum() - prior * theta.square().sum()
                scores += torch.autograd.grad(log_posterior, theta, retain_graph=True)

            with torch.no_grad():
                flat = flatten(thetas)
                if (step - 1) % kappa_every == 0:
                    layer_kappa, _ = particle_kernel(flatten(weights))
                    kappa, h = particle_kernel(flat)
                mixed = layer_kappa @ flatten(weight_grads)  # Algorithm 1
                for w, row in zip(weights, mixed, strict=True):
                    w.grad = row.view_as(w)
                repulsion = 2 / h * (kappa[:, :, None] * (flat[:, None] - flat[None])).sum(1)
                direction = (kappa @ flatten(scores) + repulsion) / particles  # SVGD
                for theta, row in zip(thetas, direction, strict=True):
                    theta.grad = -row.view_as(theta)
            optimise.step()

        if (epoch + 1) % 10 == 0 or epoch + 1 == epochs:
            with torch.no_grad():
                mean = torch.stack(probabilities(x, weights, thetas, frequencies)).mean(0)
                error = float((mean.argmax(-1) != labels).float().mean())
                loss_now = -float((mean * y).sum(-1).log().mean())
            if (error, loss_now) < best:
                best = (error, loss_now)
                kept = ([w.detach().clone() for w in weights], [t.detach().clone() for t in thetas])

    with torch.no_grad():
        return torch.stack(probabilities(normalize(query, dim=-1), *kept, frequencies)).mean(0)


def blr(
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    seed: int,
    *,
    particles: int = 10,
    epochs: int = 100,
    batch_size: int = 5,
    learning_rate: float = 1e-3,
    prior: float = 1e-3,
) -> Tensor:
    """Bayesian logistic regression by SVGD on one episode; class probabilities of the queries `[q, C]`."""
    n, features = support.shape
    classes, draws = int(labels.max()) + 1, Draws(seed)
    thetas = list(draws.normal(particles, classes, features).to(support) / features**0.5)
    x, y = normalize(support, dim=-1), one_hot(labels, classes)
    optimise = torch.optim.Adam(thetas, lr=learning_rate)
    best, kept = (math.inf, math.inf), thetas
    for epoch, order in enumerate(draws.orders(epochs, n)):
        for batch in order.split(batch_size):
            scores = []
            for theta in thetas:
                theta.requires_grad_()
                right = ((x[batch] @ theta.T).log_softmax(-1) * y[batch]).sum()
                log_posterior = n / len(batch) * right - prior * theta.square().sum()
                scores += torch.autograd.grad(log_posterior, theta)
            with torch.no_grad():
                flat = flatten(thetas)
                kappa, h = particle_kernel(flat)
                repulsion = 2 / h * (kappa[:, :, None] * (flat[:, None] - flat[None])).sum(1)
                direction = (kappa @ flatten(scores) + repulsion) / particles
                for theta, row in zip(thetas, direction, strict=True):
                    theta.grad = -row.view_as(theta)
            optimise.step()
        if (epoch + 1) % 10 == 0 or epoch + 1 == epochs:
            with torch.no_grad():
                mean = torch.stack([(x @ theta.T).softmax(-1) for theta in thetas]).mean(0)
                error = float((mean.argmax(-1) != labels).float().mean())
                loss = -float((mean * y).sum(-1).log().mean())
            if (error, loss) < best:
                best, kept = (error, loss), [theta.detach().clone() for theta in thetas]
    q = normalize(query, dim=-1)
    return torch.stack([(q @ theta.T).softmax(-1) for theta in kept]).mean(0)


def warm_up() -> None:
    """Let torch import what its optimisers need, which takes seconds and belongs to no episode."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def cosine(support: Tensor, labels: Tensor, query: Tensor, seed: int, epochs: int = 100) -> Tensor:
    """Baseline++ fine-tuning as Chen et al. (2019) do it; class probabilities of the queries `[q, C]`."""
    n, features = support.shape
    classes = int(labels.max()) + 1
    draws = Draws(seed)
    initial = (2 * draws.uniform(classes, features).to(support) - 1) / features**0.5
    layer = torch.nn.Linear(features, classes, bias=False, dtype=support.dtype)
    with torch.no_grad():
        layer.weight.copy_(initial)
    layer = torch.nn.utils.parametrizations.weight_norm(layer, dim=0)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9, dampening=0.9, weight_decay=0.001)
    x = normalize(support, dim=-1)
    for order in draws.orders(epochs, n):
        for batch in order.split(4):
            sgd.zero_grad()
            cross_entropy(2 * layer(x[batch]), labels[batch]).backward()
            sgd.step()
    with torch.no_grad():
        return (2 * layer(normalize(query, dim=-1))).softmax(-1)
