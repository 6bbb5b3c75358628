"""Frozen extractors: by name, from files, from torchvision and timm; the fast path equals the plain one."""

from __future__ import annotations

import sys
import types
from urllib.error import URLError

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms.functional import five_crop, resize, resized_crop

from fewshot_dpkl.backbones import Extractor, build, centre_crop, extract_features, load_backbone
from fewshot_dpkl.backbones.augment import normalise
from fewshot_dpkl.backbones.extract import WEIGHTS, without_classifier
from fewshot_dpkl.backbones.files import load_tensors, save_tensors

CARD = {"backbone": "conv4", "preprocessing": {"resize": 84, "crop": 84}}


def pixels(count: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def trained(name: str = "conv4") -> nn.Module:
    """A backbone whose batch statistics and scales are not those of a fresh one."""
    model = build(name)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 48, 48))
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_extraction_equals_the_plain_forward_pass(batch_size):
    torch.manual_seed(0)
    model = trained()
    images = pixels(9, 96)
    got = extract_features(Extractor(model, 96, 84), images, batch_size, progress=False)
    middle = torch.from_numpy(images[:, 6:90, 6:90].copy()).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = model((middle - mean.view(3, 1, 1)) / std.view(3, 1, 1)).numpy()
    assert got.shape == (9, 1600)
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_weights_and_checkpoints_load_from_a_path(tmp_path):
    model = trained()
    save_tensors(tmp_path / "w.safetensors", model.state_dict(), CARD)
    checkpoint = {f"average.{name}": value for name, value in model.state_dict().items()}
    checkpoint["optimizer.0.step"] = torch.tensor(3.0)
    save_tensors(tmp_path / "c.checkpoint.safetensors", checkpoint, CARD)
    x = torch.from_numpy(pixels(2, 84))
    for path in (tmp_path / "w.safetensors", tmp_path / "c.checkpoint.safetensors"):
        extractor = load_backbone(path)
        assert not any(parameter.requires_grad for parameter in extractor.parameters())
        torch.testing.assert_close(extractor(x), Extractor(model, 84, 84)(x))


def test_a_frozen_extractor_stays_in_evaluation_mode():
    extractor = Extractor(trained(), 84, 84).train()
    assert not any(module.training for module in extractor.modules())


def test_mirrored_features_are_the_mean_over_a_picture_and_its_mirror_image(tmp_path):
    model, x = trained(), pixels(3, 84)
    plain, both = Extractor(model, 84, 84), Extractor(model, 84, 84, mirror=True)
    expected = (extract_features(plain, x) + extract_features(plain, x[:, :, ::-1])) / 2
    np.testing.assert_allclose(extract_features(both, x), expected, atol=1e-5)
    np.testing.assert_allclose(extract_features(both, x[:, :, ::-1]), expected, atol=1e-5)
    assert plain.identity != both.identity
    path = tmp_path / "w.safetensors"
    save_tensors(path, model.state_dict(), {**CARD, "preprocessing": both.preprocessing})
    assert load_backbone(path).mirror


def test_corners_have_half_of_the_weight_as_torchvision_cuts_them(tmp_path):
    model, x = trained(), pixels(3, 84)
    whole, corners = Extractor(model, 84, 84, mirror=True), Extractor(model, 84, 84, mirror=True, corners=0.8)
    picture, looks = normalise(torch.from_numpy(x)), []
    for top, left in ((0, 0), (0, 17), (17, 0), (17, 17)):  # 0.8 · 84 is 67
        cut = resized_crop(picture, top, left, 67, 67, [84, 84], antialias=False)
        looks += [model(cut), model(cut.flip(3))]
    expected = extract_features(whole, x) / 2 + torch.stack(looks).mean(0).detach().numpy() / 2
    np.testing.assert_allclose(extract_features(corners, x), expected, atol=1e-4)
    assert whole.identity != corners.identity
    path = tmp_path / "w.safetensors"
    save_tensors(path, model.state_dict(), {**CARD, "preprocessing": corners.preprocessing})
    assert load_backbone(path).corners == (0.8,)
    with pytest.raises(ValueError, match=r"corners is 1\.5; expected a share"):
        Extractor(model, 84, 84, corners=1.5)


def test_the_whole_and_corners_of_every_size_have_the_same_weight(tmp_path):
    model, x = trained(), pixels(3, 84)
    whole, larger, smaller, both = (
        extract_features(Extractor(model, 84, 84, corners=corners), x)
        for corners in (None, 0.9, 0.7, (0.9, 0.7))
    )
    expected = (whole + (2 * larger - whole) + (2 * smaller - whole)) / 3  # one size: half of the weight
    np.testing.assert_allclose(both, expected, atol=1e-4)
    made = Extractor(model, 84, 84, corners=[0.9, 0.7])
    save_tensors(
        tmp_path / "w.safetensors", model.state_dict(), {**CARD, "preprocessing": made.preprocessing}
    )
    read = load_backbone(tmp_path / "w.safetensors")
    assert read.corners == (0.9, 0.7)
    assert read.like(corners=0.9).identity != read.identity


def test_looks_may_have_fewer_pixels_than_the_picture_they_are_cut_from(tmp_path):
    model, x = trained(), pixels(3, 96)
    looks = Extractor(model, 96, 96, corners=0.875, side=84)
    picture = normalise(torch.from_numpy(x))
    corners = torch.stack([model(corner) for corner in five_crop(picture, 84)[:4]]).mean(0)
    expected = model(resize(picture, [84, 84], antialias=True)) / 2 + corners / 2  # 0.875 · 96 is 84
    np.testing.assert_allclose(extract_features(looks, x), expected.detach(), atol=1e-4)
    assert Extractor(model, 96, 96, corners=0.875).identity != looks.identity
    path = tmp_path / "w.safetensors"
    save_tensors(path, model.state_dict(), {**CARD, "preprocessing": looks.preprocessing})
    np.testing.assert_allclose(load_backbone(path).embed(x), expected.detach(), atol=1e-4)


@pytest.mark.parametrize("name", sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))
def test_shipped_backbones_load_by_name(name):
    extractor = load_backbone(name)
    assert extractor(torch.from_numpy(pixels(2, extractor.crop))).shape == (2, 1600)
    assert {"dataset", "split", "recipe", "seed", "kept"} <= set(extractor.card)
    assert extractor.card["split"] == "base"
    assert (WEIGHTS / f"{name}.safetensors").stat().st_size < 600_000


def test_what_is_no_backbone_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no backbone 'nowhere'; give one that is shipped"):
        load_backbone("nowhere")
    save_tensors(tmp_path / "other.safetensors", build("conv6").state_dict(), CARD)
    with pytest.raises(ValueError, match="are not those of a conv4"):
        load_backbone(tmp_path / "other.safetensors")
    save_tensors(tmp_path / "bare.safetensors", build("conv4").state_dict(), {})
    with pytest.raises(ValueError, match="has no card of a backbone"):
        load_backbone(tmp_path / "bare.safetensors")
    whole = (tmp_path / "bare.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_backbone(tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match="have 80 pixels, but the backbone wants 84"):
        centre_crop(pixels(1, 80), 84)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_tensors(path, {"a": torch.ones(3)}, {"version": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match=r"cannot write .*: No space left on device; nothing was changed there"):
        save_tensors(path, {"a": torch.zeros(3)}, {"version": 2})
    assert load_tensors(path)[1] == {"version": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(("name", "features"), [("resnet18", 512), ("mobilenet_v3_small", 1024)])
def test_torchvision_models_become_extractors(name, features):
    extractor = load_backbone(f"torchvision:{name}", pretrained=False)
    assert extract_features(extractor, pixels(2, extractor.resize), progress=False).shape == (2, features)
    assert extractor.card["backbone"] == f"torchvision:{name}"


def test_without_a_network_the_error_says_so(monkeypatch):
    def offline(*_, **__):
        raise URLError("Name or service not known")

    monkeypatch.setattr("torchvision.models.get_model", offline)
    with pytest.raises(
        OSError, match=r"cannot get the weights of torchvision:resnet18 .*; connect to the net"
    ):
        load_backbone("torchvision:resnet18")


def test_unknown_torchvision_models_are_refused():
    with pytest.raises(ValueError, match="torchvision has no model 'resnet17'"):
        load_backbone("torchvision:resnet17")
    with pytest.raises(ValueError, match="has no linear classifier to remove"):
        without_classifier(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_timm_models_become_extractors(monkeypatch):
    """With a stand-in for timm, which need not be installed."""

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        if name != "tiny":
            raise RuntimeError("Unknown model")
        assert num_classes == 0
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    config = {"input_size": (3, 40, 40), "crop_pct": 0.8, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    stand_in = types.ModuleType("timm")
    stand_in.create_model = create_model
    stand_in.data = types.SimpleNamespace(resolve_model_data_config=lambda model: config)
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    extractor = load_backbone("timm:tiny", pretrained=False)
    assert (extractor.resize, extractor.crop) == (50, 40)
    white = np.full((1, 50, 50, 3), 255, np.uint8)
    assert extract_features(extractor, white, progress=False) == pytest.approx(np.ones((1, 3)))
    with pytest.raises(ValueError, match="timm cannot make 'huge'"):
        load_backbone("timm:huge")


def test_without_timm_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="timm is not installed; install it with `pip install timm`"):
        load_backbone("timm:resnet50")


def test_a_module_with_another_kind_of_output_is_refused():
    with pytest.raises(ValueError, match="one tensor with a row per picture"):
        Extractor(nn.Flatten(0), 84, 84)(torch.from_numpy(pixels(2, 84)))


def test_weights_in_a_file_of_ones_own_fill_a_torchvision_model(tmp_path):
    from torchvision import models

    torch.manual_seed(1)
    state = models.mobilenet_v3_small().state_dict()
    torch.save(state, tmp_path / "weights.pth")
    save_file(state, tmp_path / "weights.safetensors")
    name = "torchvision:mobilenet_v3_small"
    backbone = load_backbone(f"{name}@{tmp_path / 'weights.pth'}")
    kept = backbone.module.state_dict()
    assert all(torch.equal(kept[key], value) for key, value in state.items() if key in kept)
    assert (
        load_backbone(f"{name}@{tmp_path / 'weights.safetensors'}").card["weights"] == "weights.safetensors"
    )
    assert load_backbone(backbone.name).identity == backbone.identity
    with pytest.raises(ValueError, match=r"weights\.pth are not those of a ResNet of this size"):
        load_backbone(f"torchvision:resnet18@{tmp_path / 'weights.pth'}")
    with pytest.raises(FileNotFoundError, match=r"there are no weights at .*nowhere\.pth"):
        load_backbone(f"{name}@{tmp_path / 'nowhere.pth'}")
    (tmp_path / "other.pth").write_bytes(b"PK\3\4 cut off")
    torch.save({"model": state}, tmp_path / "nested.pth")
    torch.save(models.mobilenet_v3_small(), tmp_path / "module.pth")  # would run code to be read
    for file in ("other.pth", "nested.pth", "module.pth"):
        with pytest.raises(
            ValueError, match=rf"{file} is not a state dict; give a state dict that torch\.save"
        ):
            load_backbone(f"{name}@{tmp_path / file}")


def test_a_state_dict_as_a_backbone_gets_a_sentence_that_fits(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"w\.pth is a state dict: .* torchvision:resnet18@"):
        load_backbone(tmp_path / "w.pth")
    save_file(trained().state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"has no card of a backbone: .* torchvision:resnet18@"):
        load_backbone(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"backbone": 3}, "backbone is 3, expected str"),
        ({"backbone": "conv9"}, "unknown architecture 'conv9'"),
        ({"backbone": "conv6"}, "are not those of a conv6"),
        ({"preprocessing": []}, "preprocessing is .* expected dict"),
        ({"preprocessing": {"resize": 84}}, "crop is missing"),
        ({"preprocessing": {"resize": 84, "crop": 10**9}}, "it wants 1000000000 of 84 pixels"),
        ({"preprocessing": {"resize": 84, "crop": 84, "mirror": "yes"}}, "mirror is yes, expected bool"),
    ],
)
def test_a_card_that_cannot_be_right_is_refused(card, words, tmp_path):
    save_tensors(tmp_path / "w.safetensors", trained().state_dict(), {**CARD, **card})
    with pytest.raises(ValueError, match=words):
        load_backbone(tmp_path / "w.safetensors")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    state = trained().state_dict()
    next(iter(state.values()))[0] = torch.nan
    save_tensors(tmp_path / "w.safetensors", state, CARD)
    with pytest.raises(ValueError, match="holds values that are not finite"):
        load_backbone(tmp_path / "w.safetensors")
