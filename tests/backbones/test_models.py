"""Backbones: the fast block is the textbook block, sizes, imported weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fewshot_dpkl.backbones import ARCHITECTURES, build, conv_from_closer_look, fold_batch_norm
from fewshot_dpkl.backbones.conv import ConvBlock
from fewshot_dpkl.backbones.fused import norm_pool
from fewshot_dpkl.backbones.head import CosineClassifier, prototype_loss


class TextbookBlock(nn.Module):
    """Convolution, batch normalisation, ReLU, max-pooling, in the order of the papers."""

    def __init__(self, channels_in: int, channels_out: int, bias: bool = False, relu: bool = True) -> None:
        super().__init__()
        self.activate = F.relu if relu else nn.Identity()
        self.C = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=bias)
        self.BN = nn.BatchNorm2d(channels_out)

    def forward(self, x):
        return F.max_pool2d(self.activate(self.BN(self.C(x))), 2)


def randomise(norm: nn.BatchNorm2d) -> None:
    """Scales of both signs, shifts and statistics that are not those of a fresh layer."""
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)


@pytest.mark.parametrize("size", [16, 21])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_block_equals_the_textbook_block(size, training, relu):
    torch.manual_seed(0)
    block, textbook = ConvBlock(5, 8, relu=relu), TextbookBlock(5, 8, relu=relu)
    randomise(block.norm)
    textbook.C.load_state_dict(block.conv.state_dict())
    textbook.BN.load_state_dict(block.norm.state_dict())
    block.train(training)
    textbook.train(training)
    x = torch.randn(6, 5, size, size)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = block(mine), textbook(theirs)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    toward = torch.randn_like(out)
    (out * toward).sum().backward()
    (expected * toward).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3)
    for name, parameter in (("conv.weight", textbook.C.weight), ("norm.weight", textbook.BN.weight)):
        torch.testing.assert_close(block.get_parameter(name).grad, parameter.grad, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(block.norm.bias.grad, textbook.BN.bias.grad, atol=1e-4, rtol=1e-3)
    for name, buffer in textbook.BN.named_buffers():
        torch.testing.assert_close(block.norm.get_buffer(name), buffer, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("relu", [True, False])
def test_fused_step_has_the_right_gradient(relu):
    torch.manual_seed(0)
    z = torch.randn(3, 2, 5, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    gamma, beta = torch.rand(2, dtype=torch.float64) + 0.5, torch.randn(2, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (z, gamma, beta)]
    assert torch.autograd.gradcheck(lambda *a: norm_pool(*a, 1e-5, relu)[0], inputs)


def test_moments_are_those_of_var_mean_even_far_from_zero():
    z = (torch.randn(4, 8, 30, 30) + 3).contiguous(memory_format=torch.channels_last)
    var, mean = torch.var_mean(z.double(), (0, 2, 3), correction=0)
    _, got_mean, got_var = norm_pool(z, torch.ones(8), torch.zeros(8), 1e-5, relu=True)
    torch.testing.assert_close(got_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_var.double(), var, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("conv4", 1600),
        ("conv4-signed", 1600),
        ("conv6", 1600),
        ("resnet10", 512),
        ("resnet12", 640),
        ("resnet18", 512),
    ],
)
def test_architectures_turn_84_pixels_into_features(name, features):
    model = build(name).eval()
    assert model(torch.zeros(2, 3, 84, 84)).shape == (2, features)
    assert set(ARCHITECTURES) == {"conv4", "conv4-signed", "conv6", "resnet10", "resnet12", "resnet18"}


def test_only_signed_features_are_negative():
    torch.manual_seed(0)
    plain, signed = build("conv4").eval(), build("conv4-signed").eval()
    signed.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 48, 48)
    assert signed(x).min() < 0
    torch.testing.assert_close(signed(x).relu(), plain(x))


def test_a_frozen_block_does_what_it_did():
    torch.manual_seed(0)
    block = ConvBlock(5, 8).eval()
    randomise(block.norm)
    x = torch.randn(6, 5, 21, 21, requires_grad=True)
    expected = block(x)
    block.frozen = True
    out = block(x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert not out.requires_grad


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_folded_model_equals_the_plain_one(name):
    torch.manual_seed(0)
    model = build(name).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            randomise(module)
    folded = fold_batch_norm(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    x = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        expected = model(x)
        assert (folded(x) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_model_that_cannot_be_traced_is_left_as_it_is():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    assert fold_batch_norm(Branches())(-torch.ones(1)).item() == 1


def test_the_seed_decides_the_weights():
    same, again, other = (build("conv4", seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not torch.equal(same["blocks.0.conv.weight"], other["blocks.0.conv.weight"])
    with pytest.raises(ValueError, match="unknown architecture 'conv5'; choose one of conv4"):
        build("conv5")


def test_conv_takes_any_size():
    assert build("conv4").eval()(torch.zeros(1, 3, 50, 35)).shape == (1, 64 * 3 * 2)


def test_closer_look_weights_give_the_same_features():
    torch.manual_seed(0)
    theirs = nn.Sequential(
        *(TextbookBlock(3 if i == 0 else 64, 64, bias=True) for i in range(4)), nn.Flatten()
    )
    for block in list(theirs)[:4]:
        randomise(block.BN)
    state = {f"feature.trunk.{name}": value for name, value in theirs.state_dict().items()}
    state["classifier.L.weight_v"] = torch.zeros(64, 1600)
    x = torch.randn(2, 3, 84, 84)
    torch.testing.assert_close(conv_from_closer_look(state)(x), theirs.eval()(x), atol=1e-4, rtol=1e-3)
    del state["feature.trunk.3.C.weight"], state["feature.trunk.3.C.bias"]
    short = {name: value for name, value in state.items() if ".3." not in name}
    with pytest.raises(ValueError, match=r"found 3 convolution blocks .* expected 4"):
        conv_from_closer_look(short)


def test_cosine_classifier_is_scaled_cosine():
    torch.manual_seed(0)
    head = CosineClassifier(classes=3, channels=4, map_size=2, scale=7.0)
    maps = torch.randn(5, 4, 2, 2)
    for b, scores in enumerate(head(maps)):
        for c, score in enumerate(scores):
            cosine = F.cosine_similarity(maps[b].flatten(), head.weight[c].flatten(), dim=0)
            assert score.item() == pytest.approx(7 * cosine.item(), abs=1e-5)


def test_prototype_loss_is_the_mean_surprise_at_the_means_of_the_others():
    torch.manual_seed(0)
    features, labels = torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, 1, 0, 2, 1, 0, 3])
    units = [row / row.norm() for row in features]
    surprise = []
    for i in (0, 1, 2, 4, 5):  # 3 and 6 are alone in their class
        weight = {}
        for c in range(4):
            mean = sum(units[j] for j in range(7) if labels[j] == c and j != i)
            weight[c] = math.exp(4 * F.cosine_similarity(features[i], mean, dim=0))
        surprise.append(-math.log(weight[int(labels[i])] / sum(weight.values())))
    assert prototype_loss(features, labels, scale=4.0).item() == pytest.approx(np.mean(surprise))

    alone = features.clone().requires_grad_()
    prototype_loss(alone, torch.arange(7)).backward()
    assert not alone.grad.any()


def test_cosine_classifier_is_resampled_to_other_map_sizes():
    head = CosineClassifier(classes=2, channels=3, map_size=5)
    head.weight.data = (
        torch.randn(2, 3, 1, 1).expand(2, 3, 5, 5).contiguous()
    )  # constant: resampling changes nothing
    maps = torch.randn(4, 3, 1, 1)
    large, small = head(maps.expand(4, 3, 5, 5)), head(maps.expand(4, 3, 3, 3))
    torch.testing.assert_close(large, small)
