"""What the page asks for, without HTTP: features of uploads in memory, fitted heads, answers."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fewshot_dpkl.heads import DEFAULT_HEAD, HEADS
from fewshot_dpkl.pictures.classifier import FewShotClassifier
from fewshot_dpkl.pictures.decoding import PictureError
from fewshot_dpkl.pictures.embedding import Backbone, embed, find_backbone

Value = TypeVar("Value")


@dataclass(frozen=True)
class Limits:
    """What one page may ask for."""

    picture_bytes: int = 20 * 2**20
    classes: int = 20
    pictures: int = 400  # of one question, examples and queries together
    kept: int = 2000  # features in memory; the oldest are forgotten
    name_length: int = 60


class Recent(Generic[Value]):
    """The `size` values used last, by key; all made by one thread at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: OrderedDict[Any, Value] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        if key not in self.values:
            self.values[key] = make()
        self.values.move_to_end(key)
        while len(self.values) > self.size:
            self.values.popitem(last=False)
        return self.values[key]


class Session:
    """Answers the questions of the page. Pictures are decoded, turned to features and forgotten.

    Args:
        backbones: names that may be chosen, the first is the default; all are loaded at once.
        limits: of uploads and questions.
    """

    def __init__(self, backbones: Sequence[str], limits: Limits | None = None) -> None:
        self.backbones = list(backbones)
        self.limits = limits or Limits()
        self._lock = threading.Lock()  # one picture or fit at a time: memory stays bounded
        self._loaded = {name: find_backbone(name) for name in self.backbones}
        self._features: Recent[np.ndarray] = Recent(self.limits.kept)
        self._fitted: Recent[FewShotClassifier] = Recent(8)

    def about(self) -> dict[str, Any]:
        """What the page needs to know."""
        about = {"heads": list(HEADS), "default": DEFAULT_HEAD, "backbones": self.backbones}
        return {**about, "limits": asdict(self.limits)}

    def add(self, backbone: str, content: bytes) -> dict[str, str]:
        """Turn a picture file into features; the answer is the name to ask for it by."""
        key = hashlib.sha256(content).hexdigest()
        with self._lock:
            extractor = self._backbone(backbone)
            self._features.get((backbone, key), lambda: _features(extractor, content))
        return {"id": key}

    def classify(self, question: Any) -> dict[str, Any]:
        """Answer `{backbone, heads, classes: [{name, pictures: [id]}], queries: [id]}`.

        The answer is `{missing: [id]}` when pictures have to be added (again) first, else for each head and
        query the probabilities, the spread of the particles (standard deviation) and the entropy as a share
        of the largest possible one.
        """
        backbone, heads, classes, queries = self._checked(question)
        with self._lock:
            missing = self._missing(backbone, [*(key for _, keys in classes for key in keys), *queries])
            if missing:
                return {"missing": missing}
            X = np.stack([self._features.values[backbone, key] for key in queries])
            return {
                "classes": [name for name, _ in classes],
                "heads": {head: _answer(self._fit(backbone, head, classes), classes, X) for head in heads},
            }

    def model(self, question: Any) -> bytes:
        """The fitted classifier of a question with one head as a safetensors file."""
        backbone, heads, classes, _ = self._checked(question, with_queries=False)
        with self._lock:
            if self._missing(backbone, [key for _, keys in classes for key in keys]):
                raise ValueError("some pictures are no longer known; classify again first")
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.safetensors")
                self._fit(backbone, heads[0], classes).save(path)
                return path.read_bytes()

    def _backbone(self, name: str) -> Backbone:
        if name not in self._loaded:
            raise ValueError(f"the backbone {name!r} was not offered; choose {', '.join(self.backbones)}")
        return self._loaded[name]

    def _missing(self, backbone: str, keys: list[str]) -> list[str]:
        return [key for key in dict.fromkeys(keys) if (backbone, key) not in self._features.values]

    def _fit(self, backbone: str, head: str, classes: list[tuple[str, list[str]]]) -> FewShotClassifier:
        def fit() -> FewShotClassifier:
            keys = [key for _, keys in classes for key in keys]
            X = np.stack([self._features.values[backbone, key] for key in keys])
            labels = [name for name, keys in classes for _ in keys]
            return FewShotClassifier(self._backbone(backbone), head).fit_features(X, labels)

        return self._fitted.get((backbone, head, str(classes)), fit)

    def _checked(
        self, question: Any, with_queries: bool = True
    ) -> tuple[str, list[str], list[tuple[str, list[str]]], list[str]]:
        """The parts of a question, or a sentence that says what is wrong with it."""
        limits = self.limits
        try:
            backbone, heads = str(question["backbone"]), [str(head) for head in question["heads"]]
            classes = [
                (str(each["name"]).strip(), [str(key) for key in each["pictures"]])
                for each in question["classes"]
            ]
            queries = [str(key) for key in question["queries"]] if with_queries else []
        except (TypeError, KeyError, AttributeError):
            raise ValueError("the question is not understood; reload the page") from None
        names = [name for name, _ in classes]
        total = sum(len(keys) for _, keys in classes) + len(queries)
        if backbone not in self.backbones or not heads or not set(heads) <= set(HEADS):
            raise ValueError("this head or backbone is not known; reload the page")
        if len(names) < 2 or not all(keys for _, keys in classes) or (with_queries and not queries):
            raise ValueError("give at least two classes with a picture each, and a picture to classify")
        if len(names) > limits.classes or total > limits.pictures:
            raise ValueError(f"at most {limits.classes} classes and {limits.pictures} pictures are taken")
        if len(set(names)) < len(names) or not all(0 < len(name) <= limits.name_length for name in names):
            raise ValueError(f"give every class a name of its own, at most {limits.name_length} letters long")
        return backbone, list(dict.fromkeys(heads)), classes, queries


def _features(backbone: Backbone, content: bytes) -> np.ndarray:
    features, refused = embed(backbone, [content])
    if refused:
        raise PictureError(refused[0])
    return features[0]


def _answer(
    classifier: FewShotClassifier, classes: list[tuple[str, list[str]]], X: np.ndarray
) -> dict[str, Any]:
    """Probabilities `[q, C]`, spread `[q, C]` and entropy `[q]`, columns in the order of `classes`."""
    order = [classifier.classes_.tolist().index(name) for name, _ in classes]
    each = classifier.head_.predict_proba_particles(X)[..., order]  # q P C
    p = each.mean(1)
    entropy = -(p * np.log(p.clip(np.finfo(float).tiny))).sum(1) / np.log(len(order))
    return {
        "probabilities": p.tolist(),
        "spread": each.std(1).tolist(),
        "entropy": entropy.tolist(),
        "particles": each.shape[1],
    }
