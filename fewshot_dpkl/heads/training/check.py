"""Small models of every kind, trained for a few steps: what compiled steps are compared with torch's on."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_dpkl.heads.cosine import CosineHead
from fewshot_dpkl.heads.training.draws import Draws, Start
from fewshot_dpkl.heads.training.layers import FreeLayers, Points, SpanLayers, SpanPoints
from fewshot_dpkl.heads.training.particle import Training, answer
from fewshot_dpkl.heads.training.similarity import (
    DotProduct,
    ExactKernel,
    FourierKernel,
    PairedProduct,
    Similarity,
)
from fewshot_dpkl.kernels import hadamard_frequencies, hadamard_scales


def trained() -> list[Tensor]:
    """Log-probabilities `[E, n, P, C]` of the support points after some steps, one tensor for each model.

    Of the cosine classifier, the class weights.
    """
    random = Draws(0)
    points = torch.nn.functional.normalize(random.normal(2, 7, 40), dim=-1)
    labels, orders = torch.arange(7).expand(2, -1) % 3, torch.stack([random.orders(4, 7) for _ in range(2)])
    start = Start((40, 3, 19), 0.2, streams=torch.stack([Draws(e).stream() for e in range(2)]))
    weights, theta = start.weights(points), random.normal(2, 3, 3, 19)
    class_weights = random.normal(2, 3, 3, 40)
    in_span = SpanPoints(points, class_weights)
    of_signs = [Start((40, 3, width), 0.2, streams=start.streams, signs=True) for width in (64, 128)]
    scales = hadamard_scales(128, 256, generator=random.generator)
    rotated = FourierKernel(hadamard_frequencies(scales), 128, scales)
    models: list[tuple[Points, Tensor, Similarity]] = [
        (SpanLayers(points, start, "adam", 0.01), theta, FourierKernel(random.normal(40, 19), 24)),
        (SpanLayers(points, of_signs[0], "adam", 0.01), random.normal(2, 3, 3, 64), ExactKernel(1.0)),
        (SpanLayers(points, of_signs[1], "adam", 0.01), random.normal(2, 3, 3, 128), rotated),
        (SpanLayers(points, start, "adam", 0.01), theta, ExactKernel(0.1)),
        (FreeLayers(points, weights, "adam", 0.01), theta, ExactKernel(1.0)),
        (FreeLayers(points, weights, "adam", 0.01), theta, PairedProduct()),
        (Points(points), class_weights, DotProduct()),
        (in_span, in_span.start, DotProduct()),
    ]
    log_rho = []
    for layers, theta, similarity in models:
        batch_size = 7 if theta.shape[-1] == 64 else 3
        training = Training(
            layers, labels, theta, similarity, orders, batch_size=batch_size, learning_rate=0.01
        )
        training.run()
        hidden = layers.hidden_of_judged()
        log_rho.append(answer(hidden, training.theta, similarity, layers.values is not None))
    cosines = CosineHead(epochs=3, learning_rate=0.3).fit_episodes(points, labels, range(2))
    return [*log_rho, cosines["class_weights"]]
