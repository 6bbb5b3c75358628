"""Frozen extractors: any trained backbone as a function from pictures to feature vectors."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from tqdm import tqdm

from fewshot_dpkl.schema import Source

from .augment import MEAN, STD, normalise
from .files import load_tensors
from .models import build, centre_crop

WEIGHTS = Path(__file__).parent / "weights"


class Extractor(nn.Module):
    """A frozen module `[B, 3, crop, crop]` to `[B, D]` with the preparation of its pictures.

    Pictures are resized so that the shorter side has `resize` pixels, the middle `crop` × `crop` is cut
    out, values are divided by 255 and normalised with `mean` and `std`. With `mirror` the features are the
    mean of those of a picture and of its mirror image. `corners` are shares of the side such as 0.8: for each
    the four corners of the picture are cut out with that share, and the features are the mean of those of the
    whole and of the mean corner of every share. Every share takes four looks more. The module sees `side` ×
    `side` pixels of every look (default: `crop`). Wrap a module of your own:
    `Extractor(module, resize=256, crop=224, card={"backbone": "mine"})`.

    Attributes:
        name: what `load_backbone` finds it by, or the name of the module on its card.
        card: where it comes from, JSON types only.
    """

    name: str

    def __init__(
        self,
        module: nn.Module,
        resize: int,
        crop: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        card: dict[str, Any] | None = None,
        mirror: bool = False,
        corners: float | Sequence[float] | None = None,
        side: int | None = None,
    ) -> None:
        super().__init__()
        shares = (
            tuple(corners) if isinstance(corners, Sequence) else (corners,) if corners is not None else ()
        )
        for share in shares:
            if not 0 < share < 1:
                raise ValueError(f"corners is {share}; expected a share of the side, such as 0.8")
        self.module = module.eval().requires_grad_(False)
        self.resize, self.crop, self.side = resize, crop, side or crop
        self.mean, self.std, self.mirror, self.corners = tuple(mean), tuple(std), mirror, shares
        self.card = {"backbone": type(module).__name__, **(card or {}), "preprocessing": self.preprocessing}
        self.name = self.card["backbone"]

    @property
    def preprocessing(self) -> dict[str, Any]:
        colours = {"mean": list(self.mean), "std": list(self.std)}
        looks: dict[str, Any] = {}
        if self.corners:  # one share as a number, as files have it
            looks["corners"] = self.corners[0] if len(self.corners) == 1 else list(self.corners)
        looks |= {"side": self.side} if self.side != self.crop else {}
        return {"resize": self.resize, "crop": self.crop, **colours, "mirror": self.mirror, **looks}

    def like(self, module: nn.Module | None = None, **changes: Any) -> Extractor:
        """The same looks through another module, or other looks (`mirror`, `corners`, `resize`, …)."""
        given = {"card": self.card, **self.preprocessing, **changes}
        return Extractor(self.module if module is None else module, **given)

    @cached_property
    def identity(self) -> str:
        """A short hash of layers, weights and preprocessing: other features, other identity."""
        digest = hashlib.sha256(json.dumps([self.card["backbone"], self.preprocessing]).encode())
        for name, layer in self.module.named_modules():
            digest.update(f"{name} {type(layer).__name__}\n".encode())
        for name, tensor in self.module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    @cached_property
    def _folded(self) -> Extractor:
        return fold(self)

    def embed(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 pictures `[N, resize, resize, 3]` to float32 features `[N, D]`, on the device of the weights.

        One picture at a time: its features do not depend on the pictures beside it.
        """
        weight = next(self.module.parameters(), torch.empty(0))
        return _run(self._folded, pixels, 1, weight.device, progress=False)

    def train(self, mode: bool = True) -> Extractor:
        """Frozen: stays in evaluation mode."""
        return super().train(False)

    def forward(self, pictures: Tensor) -> Tensor:
        """uint8 pictures `[B, crop, crop, 3]` to float32 features `[B, D]`."""
        whole = normalise(pictures, self.mean, self.std)  # B 3 crop crop
        looks = [self._look(whole)]
        for share in self.corners:
            cut = round(share * whole.shape[2])
            ends = slice(0, cut), slice(whole.shape[2] - cut, None)
            corners = [whole[:, :, rows, columns] for rows in ends for columns in ends]
            looks.append(torch.stack(list(map(self._look, corners))).mean(0))
        return looks[0] if len(looks) == 1 else torch.stack(looks).mean(0)

    def _look(self, pictures: Tensor) -> Tensor:
        """Features `[B, D]` of normalised pictures `[B, 3, H, W]`, and of their mirror images if asked."""
        smaller = pictures.shape[2] > self.side
        if pictures.shape[2] != self.side:
            pictures = F.interpolate(pictures, size=self.side, mode="bilinear", antialias=smaller)
        if self.mirror:
            return (self._features(pictures) + self._features(pictures.flip(3))) / 2
        return self._features(pictures)

    def _features(self, pictures: Tensor) -> Tensor:
        features = self.module(pictures)
        if not isinstance(features, Tensor) or len(features) != len(pictures):
            raise ValueError(
                "the backbone should give one tensor with a row per picture; wrap it so that it does"
            )
        return features.flatten(1).float()


def load_backbone(name: str | os.PathLike[str], pretrained: bool = True) -> Extractor:
    """A trained backbone as a frozen extractor.

    `name` is a shipped one (`conv4-mini-imagenet`, `conv4-cub`), a file written by
    `fewshot-dpkl train` (weights or checkpoint), `torchvision:NAME`, `timm:NAME`, or
    `torchvision:NAME@FILE` for weights of that model in a file of yours (.pth or .safetensors).
    `pretrained=False` leaves torchvision and timm models untrained, without a download.
    """
    text = str(name)
    if text.startswith("torchvision:"):
        return _from_torchvision(text.removeprefix("torchvision:"), pretrained)
    if text.startswith("timm:"):
        return _from_timm(text.removeprefix("timm:"), pretrained)
    path = WEIGHTS / f"{text}.safetensors" if (WEIGHTS / f"{text}.safetensors").is_file() else Path(text)
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in WEIGHTS.glob("*.safetensors"))) or "none"
        raise FileNotFoundError(
            f"no backbone {text!r}; give one that is shipped ({shipped}), a file written by "
            "fewshot-dpkl train, torchvision:NAME or timm:NAME"
        )
    extractor = _from_file(path)
    extractor.name = text if path.parent == WEIGHTS else str(path.resolve())
    return extractor


def _from_file(path: Path) -> Extractor:
    if is_state_dict(path):
        raise ValueError(
            f"{path} is a state dict: weights without the model that they belong to; name the model, as in "
            f"torchvision:resnet18@{path}, or load it yourself and wrap the model in backbones.Extractor"
        )
    tensors, card = load_tensors(path)
    if "backbone" not in card or "preprocessing" not in card:
        raise ValueError(
            f"{path} has no card of a backbone: weights without the model they belong to; name it, as in "
            f"torchvision:resnet18@{path}, or give a file written by fewshot-dpkl train"
        )
    source = Source(path, "backbone", "give a file written by fewshot-dpkl train")
    source.fields(card, {"backbone": str, "preprocessing": dict})
    source.fields(card["preprocessing"], {"resize": int, "crop": int})
    module = build(card["backbone"])
    averaged = {name[8:]: value for name, value in tensors.items() if name.startswith("average.")}
    wanted, found = module.state_dict(), averaged or tensors
    if {k: v.shape for k, v in wanted.items()} != {k: v.shape for k, v in found.items()}:
        raise ValueError(f"the weights in {path} are not those of a {card['backbone']}; use the file of one")
    for name, tensor in found.items():
        source.finite(name, tensor)
    module.load_state_dict(found)
    card.setdefault("name", path.stem)
    prepared = card["preprocessing"]
    looks = {
        "mirror": prepared.get("mirror", False),
        "corners": prepared.get("corners"),
        "side": prepared.get("side"),
    }
    source.fields(looks, {"mirror": bool, "corners": float | list[float] | None, "side": int | None})
    if not 16 <= (looks["side"] or prepared["crop"]) <= prepared["crop"] <= prepared["resize"] <= 4096:
        source.altered(f"it wants {prepared['crop']} of {prepared['resize']} pixels")
    return Extractor(module, prepared["resize"], prepared["crop"], card=card, **looks)


def is_state_dict(path: Path) -> bool:
    """Whether a file is one that `torch.save` writes: a zip file or, before torch 1.6, a pickle."""
    with path.open("rb") as file:
        return file.read(4) in (b"PK\3\4", b"\x80\x02\x8a\n")


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """Weights that `torch.save` or safetensors wrote; tensors only, no other object is made."""
    advice = "give a state dict that torch.save or safetensors wrote"
    if not path.is_file():
        raise FileNotFoundError(f"there are no weights at {path}; {advice}")
    source = Source(path, "state dict", advice)
    if not is_state_dict(path):
        return source.safetensors()[0]
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch raises many kinds
        source.no_such_kind()
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        source.no_such_kind()
    return {str(name): tensor for name, tensor in found.items()}


def _from_torchvision(name: str, pretrained: bool) -> Extractor:
    from torchvision import models

    name, _, file = name.partition("@")
    try:
        weights = models.get_model_weights(name).DEFAULT
        module = models.get_model(name, weights=weights if pretrained and not file else None)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"torchvision has no model {name!r}; see torchvision.models.list_models()"
        ) from error
    except OSError as error:
        raise OSError(_no_download(f"torchvision:{name}", error)) from error
    prepare = weights.transforms()
    if not hasattr(prepare, "crop_size"):
        raise ValueError(f"torchvision's {name} is no image classifier; choose one of those")
    card = {"backbone": f"torchvision:{name}", "weights": str(weights) if pretrained else "untrained"}
    if file:
        _fill(module, Path(file))
        card |= {"backbone": f"torchvision:{name}@{Path(file).resolve()}", "weights": Path(file).name}
    size = prepare.resize_size[0], prepare.crop_size[0]
    return Extractor(without_classifier(module), *size, prepare.mean, prepare.std, card)


def _fill(module: nn.Module, path: Path) -> None:
    """Put the weights of a file into a module; those of another model are refused."""
    found, wanted = _read_state_dict(path), module.state_dict()
    if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in wanted.items()}:
        raise ValueError(f"the weights in {path} are not those of a {type(module).__name__} of this size")
    module.load_state_dict(found)


def _from_timm(name: str, pretrained: bool) -> Extractor:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise ValueError("timm is not installed; install it with `pip install timm`") from error
    try:
        module = timm.create_model(name, pretrained=pretrained, num_classes=0)
    except RuntimeError as error:
        raise ValueError(f"timm cannot make {name!r} ({error}); see timm.list_models()") from error
    except OSError as error:
        raise OSError(_no_download(f"timm:{name}", error)) from error
    config = timm.data.resolve_model_data_config(module)
    crop = int(config["input_size"][1])
    card = {"backbone": f"timm:{name}", "weights": "pretrained" if pretrained else "untrained"}
    return Extractor(module, round(crop / config["crop_pct"]), crop, config["mean"], config["std"], card)


def _no_download(name: str, error: OSError) -> str:
    return (
        f"cannot get the weights of {name} ({error}); connect to the network once, they are then "
        f"kept in {torch.hub.get_dir()} or the Hugging Face cache"
    )


def without_classifier(module: nn.Module) -> nn.Module:
    """Replace the last linear layer, which turns features into class scores, by the identity."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ValueError(
            f"{type(module).__name__} has no linear classifier to remove; wrap it in an Extractor yourself"
        )
    parent, _, child = linear[-1].rpartition(".")
    setattr(module.get_submodule(parent), child, nn.Identity())
    return module


def fold_batch_norm(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode with every batch normalisation merged into the convolution before it.

    A module that cannot be traced is copied as it is.
    """
    module = copy.deepcopy(module).eval()
    try:
        return fuse(module)
    except (torch.fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError):
        return module


def fold(extractor: Extractor) -> Extractor:
    """The same extractor, faster: batch normalisation folded into the convolutions, channels-last."""
    return extractor.like(fold_batch_norm(extractor.module)).to(memory_format=torch.channels_last)


def extract_features(
    extractor: Extractor,
    pixels: np.ndarray,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> np.ndarray:
    """uint8 pictures `[N, H, H, 3]` (H ≥ crop) to float32 features `[N, D]`.

    Batch normalisation is folded into the convolutions and the layout is channels-last; the features
    equal those of the plain extractor up to rounding.
    """
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; expected at least 1")
    return _run(fold(extractor), pixels, batch_size, device, progress)


@torch.inference_mode()
def _run(
    extractor: Extractor, pixels: np.ndarray, batch_size: int, device: torch.device | str, progress: bool
) -> np.ndarray:
    pixels, extractor = centre_crop(pixels, extractor.crop), extractor.to(device)
    rows = []
    for begin in tqdm(range(0, len(pixels), batch_size), desc="features", disable=None if progress else True):
        batch = torch.from_numpy(np.array(pixels[begin : begin + batch_size]))  # a copy that can be written
        rows.append(extractor(batch.to(device)).cpu().numpy())
    return np.concatenate(rows)
