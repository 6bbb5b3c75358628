"""Muon: steps that turn filters by one length in every direction, and which parameters it is for."""

from __future__ import annotations

import pytest
import torch

from fewshot_dpkl.backbones import Recipe, Stage, build
from fewshot_dpkl.backbones.head import CosineClassifier
from fewshot_dpkl.backbones.muon import Muon, orthogonalise
from fewshot_dpkl.backbones.state import Classifier, make_optimizers


def test_orthogonalised_matrices_keep_their_singular_vectors_and_lose_their_singular_values():
    matrices = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(0)).double()
    got = orthogonalise(matrices * torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)[:, None, None])
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    core = left.mT @ got @ right.mT  # of the given vectors: diagonal, with the new values
    values = core.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(core, torch.diag_embed(values), atol=1e-9, rtol=0)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_step_turns_filters_by_the_rate_whatever_the_size_of_the_gradient():
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, 8, 4, 3, 3, generator=generator)
    moved = []
    for scale in (1.0, 1e-3):
        filters = torch.nn.Parameter(5 * start)
        filters.grad = scale * gradient
        Muon([filters], lr=0.1).step()
        moved.append(filters.detach())
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)
    unit = start * 8**0.5 / start.norm()  # as long as 8 orthonormal filters
    step = (unit - moved[0]).flatten(1)
    assert step.norm() == pytest.approx(0.1 * 8**0.5, rel=0.15)
    assert (step * gradient.flatten(1)).sum() > 0  # downhill


def test_momentum_is_the_usual_one():
    """Of gradients that are all alike, every step is the same."""
    filters = torch.nn.Parameter(torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
    gradient = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    optimizer = Muon([filters], lr=1e-3, momentum=0.9)
    for count in range(1, 4):
        filters.grad = gradient.clone()
        optimizer.step()
        expected = gradient * (1 - 0.9**count) / (1 - 0.9)
        torch.testing.assert_close(optimizer.state[filters]["velocity"], expected)


@pytest.mark.parametrize(("name", "turned"), [("conv4", 3), ("resnet10", 9)])
def test_muon_has_the_inner_filters_and_adamw_all_else(name, turned):
    backbone = build(name)
    model = Classifier(backbone, CosineClassifier(5, 64, 5))
    adamw, muon = make_optimizers(model, Recipe(stages=(Stage(1, 32, 8),)))
    filters = [p for group in muon.param_groups for p in group["params"]]
    others = [p for group in adamw.param_groups for p in group["params"]]
    assert len(filters) == turned
    assert all(p.shape[0] <= p[0].numel() for p in filters)
    assert not any(p is model.head.weight for p in filters)
    assert {id(p) for p in filters + others} == {id(p) for p in model.parameters()}
    assert len(filters) + len(others) == len(list(model.parameters()))
