"""A few pictures per class in, class probabilities of new pictures out."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils.validation import check_is_fitted

from fewshot_dpkl.heads import Head, head_for, load_head
from fewshot_dpkl.pictures.decoding import Picture, PictureError
from fewshot_dpkl.pictures.embedding import PREPARATION, Backbone, embed, find_backbone

FORMAT_VERSION = 1
KEY = "fewshot_dpkl_classifier"


class FewShotClassifier(ClassifierMixin, BaseEstimator):
    """A head on the features of a frozen backbone, fitted on pictures.

        classifier = FewShotClassifier("torchvision:resnet18", "dpkl").fit(paths, labels)
        classifier.predict_proba(more_paths)  # [n, classes], columns in the order of classifier.classes_

    Pictures are paths, PIL images, arrays `[H, W, 3]` or tensors `[3, H, W]`, in a list or a batch.

    Args:
        backbone: a name (`conv4-mini-imagenet`, `torchvision:NAME`, `timm:NAME`, a file written by
            scripts/train_backbone.py) or any `Backbone`, for instance `backbones.Extractor(module, ...)`.
        head: the name of a head, or a head.
        cache: folder that keeps the features of picture files, by content and backbone (default: no cache).
    """

    def __init__(
        self,
        backbone: str | os.PathLike[str] | Backbone = "conv4-mini-imagenet",
        head: str | Head = "dpkl",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.backbone = backbone
        self.head = head
        self.cache = cache

    def fit(self, pictures: Sequence[Picture], labels: ArrayLike) -> FewShotClassifier:
        """Learn from n pictures and their n labels of any type."""
        _check_list(pictures)
        if len(pictures) != len(np.asarray(labels)):
            raise ValueError(
                f"there are {len(pictures)} pictures but {len(np.asarray(labels))} labels; give one for each"
            )
        self.backbone_ = find_backbone(self.backbone)
        return self.fit_features(self.embed(pictures), labels)

    def fit_features(self, X: ArrayLike, labels: ArrayLike) -> FewShotClassifier:
        """Learn from features `X` `[n, D]` that `embed` made before."""
        self.backbone_ = find_backbone(self.backbone)
        card = getattr(self.backbone_, "card", None)
        head: Head = head_for(self.head, card) if isinstance(self.head, str) else clone(self.head)
        self.head_ = head.fit(X, labels)
        self.classes_ = self.head_.classes_
        return self

    def embed(self, pictures: Sequence[Picture]) -> np.ndarray:
        """Float32 features `[n, D]` of n pictures; a picture that cannot be read is named."""
        check_is_fitted(self, "backbone_")
        _check_list(pictures)
        features, refused = embed(self.backbone_, pictures, self.cache)
        for index, reason in refused.items():
            picture = pictures[index]
            name = os.fspath(picture) if isinstance(picture, (str, os.PathLike)) else f"picture {index}"
            others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            raise PictureError(f"{name}: {reason}{others}; leave it out or replace it")
        return features

    def predict_proba(self, pictures: Sequence[Picture]) -> np.ndarray:
        """Probabilities `[n, C]`, columns in the order of `classes_`."""
        check_is_fitted(self, "head_")
        return self.head_.predict_proba(self.embed(pictures))

    def predict(self, pictures: Sequence[Picture]) -> np.ndarray:
        """The most probable class of each picture: `[n]`."""
        check_is_fitted(self, "head_")
        return self.head_.predict(self.embed(pictures))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: name and identity of the backbone, preprocessing, fitted head."""
        check_is_fitted(self, "head_")
        description = {
            "version": FORMAT_VERSION,
            "preparation": PREPARATION,
            "backbone": self.backbone_.name,
            "identity": self.backbone_.identity,
            "preprocessing": self.backbone_.preprocessing,
            "checksum": _checksum(self.head_),
        }
        self.head_.save(path, {KEY: json.dumps(description)})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        backbone: str | os.PathLike[str] | Backbone | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> FewShotClassifier:
        """Read what `save` wrote; it gives the same probabilities.

        `backbone` says where the backbone is now, for one that its name does not find. Another backbone than
        the one fitted with is refused.
        """
        description = _read_description(path)
        try:
            found = find_backbone(description["backbone"] if backbone is None else backbone)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{path} was fitted with a backbone that cannot be loaded here: {error}"
            ) from error
        if found.identity != description["identity"]:
            raise ValueError(
                f"{path} was fitted with the backbone {description['backbone']} ({description['identity']}), "
                f"but {found.name} is another one here ({found.identity}: other weights or preprocessing); "
                "give the backbone it was fitted with, or fit and save it again"
            )
        head = _load_head(path, description["checksum"])
        classifier = cls(found, head.name, cache)
        classifier.backbone_, classifier.head_, classifier.classes_ = found, head, head.classes_
        return classifier


def _read_description(path: str | os.PathLike[str]) -> dict[str, str]:
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"there is no saved classifier at {path}; write one with classifier.save(path)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            description: dict[str, str] = json.loads((file.metadata() or {})[KEY])
        found = [description[key] for key in ("version", "preparation", "backbone", "identity", "checksum")]
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} is not a saved classifier; write one with classifier.save(path) or classify.py --save"
        ) from None
    if found[:2] != [FORMAT_VERSION, PREPARATION]:
        raise ValueError(
            f"{path} has classifier format {found[0]}.{found[1]}, this version of fewshot-dpkl reads format "
            f"{FORMAT_VERSION}.{PREPARATION}; fit and save it again"
        )
    return description


def _load_head(path: str | os.PathLike[str], checksum: str) -> Head:
    try:
        head = load_head(path)
    except (KeyError, TypeError, AttributeError):
        head = None
    if head is None or _checksum(head) != checksum:
        raise ValueError(f"{path} is damaged (its checksum does not fit its contents); save it again")
    return head


def _checksum(head: Head) -> str:
    """A short hash of all that a fitted head consists of."""
    parameters = {key: value for key, value in head.get_params().items() if key != "random_state"}
    about = [head.name, parameters, head.classes_.tolist(), head._order.tolist(), head.n_features_in_]
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, tensor in sorted(head.state_.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_list(pictures: Sequence[Picture]) -> None:
    is_one = isinstance(pictures, (str, bytes, os.PathLike)) or not hasattr(pictures, "__len__")
    if is_one or getattr(pictures, "ndim", 4) != 4:
        raise ValueError("give a list of pictures or a batch [N, H, W, 3]; for one picture a list of one")
