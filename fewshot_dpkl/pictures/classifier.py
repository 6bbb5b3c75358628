"""A few pictures per class in, class probabilities of new pictures out."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fewshot_dpkl.heads import DEFAULT_HEAD, Head, load_head, make_head
from fewshot_dpkl.heads.saved import description as head_description
from fewshot_dpkl.heads.suggest import suggest
from fewshot_dpkl.pictures.answers import NONE_OF_THESE, NOT_SURE
from fewshot_dpkl.pictures.decoding import Picture, PictureError
from fewshot_dpkl.pictures.embedding import PREPARATION, Backbone, embed, find_backbone
from fewshot_dpkl.schema import Source, seal

FORMAT_VERSION = 2
KEY = "fewshot_dpkl_classifier"

Pictures = Sequence[Picture] | np.ndarray | Tensor
"""Pictures in a list, a batch `[N, H, W, 3]` or `[N, 3, H, W]`, an array or pandas Series of paths."""


@dataclass(eq=False, repr=False)
class FewShotClassifier(ClassifierMixin, BaseEstimator):
    """A head on the features of a frozen backbone, fitted on pictures.

        classifier = FewShotClassifier("torchvision:resnet18").fit(paths, labels)
        classifier.predict_proba(more_paths)  # [n, classes], columns in the order of classifier.classes_
        classifier.predict(more_paths, unknown=0.05)  # "none of these" outside the 95 % of known pictures

    Pictures are paths, PIL images, arrays `[H, W, 3]` or tensors `[3, H, W]`, in a list, an array, a pandas
    Series or a batch. Parameters of the head are searched as scikit-learn does: `head__learning_rate`.

    Args:
        backbone: a name (`conv4-mini-imagenet`, `torchvision:NAME`, `timm:NAME`, a file written by
            `fewshot-dpkl train`) or any `Backbone`, for instance `backbones.Extractor(module, ...)`.
        head: the name of a head, or a head.
        cache: folder that keeps the features of picture files, by content and backbone (default: no cache).
        device: where the backbone runs (default: where it is; the CPU for a name).
        threshold: `predict` answers "not sure" below this top probability.
        on_unreadable: `raise` an error at a picture that cannot be read, or `skip` it: `fit` leaves it out
            with a warning, `predict` answers None and `predict_proba` a row of NaN.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import FewShotClassifier
        >>> colours = np.array([[200, 30, 30], [30, 30, 200]]).repeat(3, 0)
        >>> pictures = [np.full((84, 84, 3), colour, "uint8") for colour in colours]
        >>> classifier = FewShotClassifier().fit(pictures, ["red"] * 3 + ["blue"] * 3)
        >>> classifier.predict(pictures[::3]).tolist()
        ['red', 'blue']
    """

    backbone: str | os.PathLike[str] | Backbone = "conv4-mini-imagenet"
    head: str | Head = DEFAULT_HEAD
    cache: str | os.PathLike[str] | None = None
    _: KW_ONLY
    device: str | torch.device | None = None
    threshold: float = 0.0
    on_unreadable: Literal["raise", "skip"] = "raise"

    def set_params(self, **parameters: Any) -> FewShotClassifier:
        """As scikit-learn's; `head__NAME` makes a head of the name of one."""
        if any(name.startswith("head__") for name in parameters):
            head = parameters.pop("head", self.head)
            self.head = make_head(head) if isinstance(head, str) else head
        super().set_params(**parameters)
        return self

    def fit(
        self, pictures: Pictures, labels: ArrayLike, unlabeled: Pictures | None = None
    ) -> FewShotClassifier:
        """Learn from n pictures and their n labels of any type.

        `unlabeled` are further pictures, of these classes or mostly so, whose labels nobody has given: they
        teach most where there are few labels. The head must be one that learns from such.
        """
        pictures, y = as_list(pictures), np.asarray(labels)
        self._check()
        if len(pictures) != len(y):
            raise ValueError(f"there are {len(pictures)} pictures but {len(y)} labels; give one for each")
        self.backbone_ = self._backbone()
        features, refused = self._embed(pictures)
        if refused:
            kept = np.delete(np.arange(len(y)), list(refused))
            lost = sorted(set(y.tolist()) - set(y[kept].tolist()))
            if lost:
                raise PictureError(f"class {lost[0]!r} has no picture that can be read; give it at least one")
            warnings.warn(f"left out {_listed(pictures, refused)}", stacklevel=2)
            y = y[kept]
        if unlabeled is None or not len(unlabeled):
            return self.fit_features(features, y)
        return self.fit_features(features, y, self._embed(as_list(unlabeled))[0])

    def fit_features(
        self, X: ArrayLike, labels: ArrayLike, unlabeled: ArrayLike | None = None
    ) -> FewShotClassifier:
        """Learn from features `X` `[n, D]` that `embed` made before, and from `unlabeled` ones `[u, D]`."""
        self._check()
        self.backbone_ = self._backbone()
        head: Head = make_head(self.head) if isinstance(self.head, str) else clone(self.head)
        self.head_ = head.fit(X, labels) if unlabeled is None else head.fit(X, labels, unlabeled)
        self.classes_, self.labeled_ = self.head_.classes_, np.asarray(X)
        return self

    def embed(self, pictures: Pictures) -> np.ndarray:
        """Float32 features `[n, D]` of n pictures; rows of NaN for those that are skipped."""
        pictures = as_list(pictures)
        features, refused = self._embed(pictures)
        whole = np.full((len(pictures), features.shape[1]), np.nan, np.float32)
        whole[[index for index in range(len(pictures)) if index not in refused]] = features
        return whole

    def predict_proba(self, pictures: Pictures) -> np.ndarray:
        """Probabilities `[n, C]`, columns in the order of `classes_`; NaN for a picture that is skipped."""
        return self._ask(pictures, lambda X: self.head_.predict_proba(X))

    def unfamiliarity(self, pictures: Pictures) -> np.ndarray:
        """`[n]`, 0 to 1: the share of known examples that look more familiar; NaN for a skipped picture."""
        return self._ask(pictures, lambda X: unfamiliarity(self.head_, X))

    def predict(self, pictures: Pictures, unknown: float | None = None) -> np.ndarray:
        """The most probable class of each picture: `[n]`.

        With `unknown` (a share of known pictures, such as 0.05), "none of these" for those that look less
        familiar than all but this share of the known; "not sure" below the threshold; None for a picture
        that is skipped. The array is then one of objects, else of the type of the labels.
        """
        check_is_fitted(self, "head_")
        check_share("unknown", unknown)
        pictures = as_list(pictures)
        features, refused = self._embed(pictures)
        read = [index for index in range(len(pictures)) if index not in refused]
        answers = np.full(len(pictures), None, object)
        if read:
            p = self.head_.predict_proba(features)
            best = self.classes_[p.argmax(1)]
            if not self.threshold and unknown is None and not refused:
                return best
            answers[read] = best.tolist()
            answers[np.array(read)[p.max(1) < self.threshold]] = NOT_SURE
            if unknown is not None:
                answers[np.array(read)[unfamiliarity(self.head_, features) > 1 - unknown]] = NONE_OF_THESE
        return answers

    def suggest(self, pictures: Pictures, count: int = 5) -> np.ndarray:
        """The numbers `[count]` of the pictures whose labels would teach the most, the best first.

        They are compared with the pictures that `fit` was given, which a saved file does not hold.
        """
        check_is_fitted(self, "head_")
        if not hasattr(self, "labeled_"):
            raise ValueError("a loaded classifier does not hold the pictures it was fitted on; fit it again")
        features = self.embed(pictures)
        read = np.flatnonzero(np.isfinite(features).all(1))
        return read[suggest(features[read], self.labeled_, count)]

    def score(self, pictures: Pictures, labels: Sequence[Any], sample_weight: Any = None) -> float:
        """The share of right answers; what is not answered is not right."""
        right = [answer == label for answer, label in zip(self.predict(pictures), labels, strict=True)]
        return float(np.average(right, weights=sample_weight))

    def _check(self) -> None:
        """Refuse parameters that cannot work, before any picture is looked at."""
        if self.on_unreadable not in ("raise", "skip"):
            raise ValueError(f"on_unreadable is {self.on_unreadable!r}; use 'raise' or 'skip'")
        check_share("threshold", self.threshold)
        if isinstance(self.head, str):
            make_head(self.head)
        elif not isinstance(self.head, Head):
            raise ValueError(
                f"head is {type(self.head).__name__}, no head of fewshot_dpkl, and it could not be saved; "
                "give the name of one, or fit it on classifier.embed(pictures) yourself"
            )

    def _backbone(self) -> Backbone:
        backbone = find_backbone(self.backbone)
        if self.device is not None and isinstance(backbone, torch.nn.Module):
            backbone.to(self.device)
        return backbone

    def _embed(self, pictures: list[Picture]) -> tuple[np.ndarray, dict[int, str]]:
        """Features of those that can be read, and why the others cannot; at least one can."""
        backbone = self.backbone_ if hasattr(self, "backbone_") else self._backbone()
        features, refused = embed(backbone, pictures, self.cache)
        if refused and (self.on_unreadable == "raise" or not len(features)):
            raise PictureError(f"{_listed(pictures, refused)}; leave out or replace what cannot be read")
        return features, refused

    def _ask(self, pictures: Pictures, answer: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """What `answer` says of the features of the pictures that can be read, NaN for the others."""
        check_is_fitted(self, "head_")
        features = self.embed(pictures)
        read = np.isfinite(features).all(1)
        said = answer(features[read])
        whole = np.full((len(features), *said.shape[1:]), np.nan)
        whole[read] = said
        return whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: name and identity of the backbone, preprocessing, fitted head."""
        check_is_fitted(self, "head_")
        description = {
            "version": FORMAT_VERSION,
            "preparation": PREPARATION,
            "backbone": self.backbone_.name,
            "identity": self.backbone_.identity,
            "preprocessing": self.backbone_.preprocessing,
        }
        description["checksum"] = _checksum(description, self.head_)
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
        description = read_description(path)
        try:
            found = find_backbone(description["backbone"] if backbone is None else backbone)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{path} was fitted with a backbone that cannot be loaded here: {error}"
            ) from error
        if found.identity != description["identity"]:
            raise ValueError(
                f"{path} was fitted with the backbone {description['backbone']:.200} "
                f"({description['identity']}), but {found.name} is another one here "
                f"({found.identity}: other weights or preprocessing); "
                "give the backbone it was fitted with, or fit and save it again"
            )
        head = load_head(path)
        if description["version"] > 1 and _checksum(description, head) != description["checksum"]:
            raise ValueError(f"{path} is damaged (its checksum does not fit its contents); save it again")
        classifier = cls(found, head.name, cache)
        classifier.backbone_, classifier.head_, classifier.classes_ = found, head, head.classes_
        return classifier


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a saved classifier says of itself: its backbone by name and identity, preprocessing."""
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"there is no saved classifier at {path}; write one with classifier.save(path)"
        )
    source = Source(path, "saved classifier", "write one with classifier.save(path)")
    _, metadata = source.safetensors()
    if KEY not in metadata:
        source.no_such_kind()
    description = source.parse(metadata[KEY])
    found = description.get("version"), description.get("preparation")
    if found not in ((FORMAT_VERSION, PREPARATION), (1, 1)):  # 1.1 is of release 0.1.0
        raise ValueError(
            f"{path} has classifier format {found[0]!s:.20}.{found[1]!s:.20}, this version of fewshot-dpkl "
            f"reads format {FORMAT_VERSION}.{PREPARATION}; fit and save it again"
        )
    source.fields(description, {"backbone": str, "identity": str, "preprocessing": dict, "checksum": str})
    if len(description["backbone"]) > 4096 or len(description["identity"]) > 100:
        source.altered("the name of its backbone is too long")
    return description


def _checksum(description: dict[str, Any], head: Head) -> str:
    """A short hash of all that a fitted classifier consists of."""
    described = json.loads(json.dumps({**description, "head": head_description(head)["checksum"]}))
    return seal(described, {})


def unfamiliarity(head: Head, X: np.ndarray) -> np.ndarray:
    """`head.unfamiliarity(X)` `[n]`, or a sentence for a head that cannot say."""
    try:
        found: np.ndarray = head.unfamiliarity(X)  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, NotImplementedError):
        raise ValueError(
            f"the head {head.name} cannot say how unfamiliar a picture is; use {DEFAULT_HEAD}"
        ) from None
    return found


def check_share(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; expected a share from 0 to 1")


def as_list(pictures: Pictures) -> list[Picture]:
    """The pictures of a list, tuple, batch, array or Series; one picture alone is refused."""
    is_one = isinstance(pictures, (str, bytes, os.PathLike)) or not hasattr(pictures, "__len__")
    if not is_one and not len(pictures):
        raise ValueError("there are no pictures; give at least one")
    dimensions = getattr(pictures, "ndim", 1)
    is_paths = getattr(getattr(pictures, "dtype", None), "kind", "O") not in "biuf"
    if is_one or dimensions not in ((1,) if is_paths and not isinstance(pictures, Tensor) else (4,)):
        raise ValueError("give a list of pictures or a batch [N, H, W, 3]; for one picture a list of one")
    return list(pictures)


def _listed(pictures: list[Picture], refused: dict[int, str], most: int = 5) -> str:
    """The pictures that cannot be read, by name and reason; of many, the first few and how many more."""
    names = []
    for index, reason in list(refused.items())[:most]:
        picture = pictures[index]
        name = os.fspath(picture) if isinstance(picture, (str, os.PathLike)) else f"picture {index}"
        names.append(f"{name}: {reason}")
    more = [f"and {len(refused) - most} more"] if len(refused) > most else []
    return ", ".join([*names, *more])
