"""What the page asks for, without HTTP: features of uploads in memory, fitted heads, answers."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fewshot_dpkl.heads import DEFAULT_HEAD, HEADS
from fewshot_dpkl.pictures.classifier import FewShotClassifier, read_description, unfamiliarity
from fewshot_dpkl.pictures.decoding import PictureError
from fewshot_dpkl.pictures.embedding import Backbone, embed, find_backbone

Value = TypeVar("Value")


@dataclass(frozen=True)
class Limits:
    """What one page may ask for."""

    picture_bytes: int = 20 * 2**20
    model_bytes: int = 64 * 2**20
    classes: int = 20
    pictures: int = 400  # of one question, examples and queries together
    kept: int = 2000  # features in memory; the oldest are forgotten
    name_length: int = 60


@dataclass(frozen=True)
class Question:
    """What a page asks: classes of examples for heads to learn (or a model), and pictures to classify."""

    backbone: str
    heads: list[str]
    classes: list[tuple[str, list[str]]]
    queries: list[str]
    unfamiliar: bool
    transductive: bool  # learn from the pictures to classify, too
    model: str | None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.classes]

    @classmethod
    def of(cls, question: Any, with_queries: bool) -> Question:
        """From JSON; raises all kinds of errors where it is something else."""
        transductive = bool(question.get("transductive")) and not question.get("model")
        classes = question.get("classes", []) if question.get("model") else question["classes"]
        return cls(
            str(question["backbone"]),
            list(dict.fromkeys(map(str, question.get("heads", [])))),
            [(str(each["name"]).strip(), [str(key) for key in each["pictures"]]) for each in classes],
            [str(key) for key in question["queries"]] if with_queries or transductive else [],
            bool(question.get("unfamiliar")),
            transductive,
            str(question["model"]) if question.get("model") else None,
        )


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
        self._models: Recent[FewShotClassifier] = Recent(8)
        self.run = secrets.token_hex(8)  # what a browser kept of another run is of no use

    def about(self) -> dict[str, Any]:
        """What the page needs to know."""
        about = {"heads": list(HEADS), "default": DEFAULT_HEAD, "backbones": self.backbones}
        return {**about, "run": self.run, "limits": asdict(self.limits)}

    def add(self, backbone: str, content: bytes) -> dict[str, str]:
        """Turn a picture file into features; the answer is the name to ask for it by."""
        key = hashlib.sha256(content).hexdigest()
        with self._lock:
            extractor = self._backbone(backbone)
            self._features.get((backbone, key), lambda: _features(extractor, content))
        return {"id": key}

    def classify(self, question: Any) -> dict[str, Any]:
        """Answer `{backbone, heads, classes: [{name, pictures: [id]}], queries: [id], unfamiliar}`.

        With `transductive`, heads that can learn from the queries, too. A question with `model` (see `load`)
        needs neither heads nor classes. The answer is `{missing: [id]}` when pictures have to be added
        (again) first, else for each head and query the probabilities, the
        spread of the particles (standard deviation) and the entropy as a share of the largest possible one;
        if `unfamiliar` asks for it, how unfamiliar the query is, null for a head that cannot say.
        """
        asked = self._checked(question)
        with self._lock:
            missing = self._missing(asked)
            if missing:
                return {"missing": missing}
            X = np.stack([self._features.values[asked.backbone, key] for key in asked.queries])
            fitted = self._fitted_heads(asked)
            names = asked.names or [str(name) for name in next(iter(fitted.values())).classes_]
            said = {head: _answer(each, names, X, asked.unfamiliar) for head, each in fitted.items()}
            return {"classes": names, "heads": said}

    def model(self, question: Any) -> bytes:
        """The fitted classifier of a question with one head as a safetensors file."""
        asked = self._checked(question, with_queries=False)
        with self._lock:
            if self._missing(asked):
                raise ValueError("some pictures are no longer known; classify again first")
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.safetensors")
                next(iter(self._fitted_heads(asked).values())).save(path)
                return path.read_bytes()

    def load(self, content: bytes) -> dict[str, Any]:
        """Take a saved classifier; the answer is the name to ask for it by, and what it is."""
        with tempfile.TemporaryDirectory() as folder, self._lock:
            path = Path(folder, "the model")
            path.write_bytes(content)
            about = read_description(path)
            names = [n for n, each in self._loaded.items() if each.identity == about["identity"]]
            if not names:
                raise ValueError(
                    f"this model was fitted with the backbone {about['backbone']:.200}, which is not offered "
                    "here; start the page with --backbone and its name"
                )
            key = hashlib.sha256(content).hexdigest()
            loaded = self._models.get(key, lambda: FewShotClassifier.load(path, self._loaded[names[0]]))
        classes = [str(name) for name in loaded.classes_]
        return {"id": key, "head": loaded.head_.name, "classes": classes, "backbone": names[0]}

    def _backbone(self, name: str) -> Backbone:
        if name not in self._loaded:
            raise ValueError(f"the backbone {name!r} was not offered; choose {', '.join(self.backbones)}")
        return self._loaded[name]

    def _missing(self, asked: Question) -> list[str]:
        keys = [*(key for _, keys in asked.classes for key in keys), *asked.queries]
        return [key for key in dict.fromkeys(keys) if (asked.backbone, key) not in self._features.values]

    def _fitted_heads(self, asked: Question) -> dict[str, FewShotClassifier]:
        if asked.model is not None:
            if asked.model not in self._models.values:
                raise ValueError("this model is no longer known here; load it again")
            loaded = self._models.values[asked.model]
            return {loaded.head_.name: loaded}
        return {head: self._fit(asked, head) for head in asked.heads}

    def _fit(self, asked: Question, head: str) -> FewShotClassifier:
        def fit() -> FewShotClassifier:
            keys = [key for _, keys in asked.classes for key in keys]
            X = np.stack([self._features.values[asked.backbone, key] for key in keys])
            labels = [name for name, keys in asked.classes for _ in keys]
            classifier = FewShotClassifier(self._backbone(asked.backbone), head)
            if not taught:
                return classifier.fit_features(X, labels)
            more = np.stack([self._features.values[asked.backbone, key] for key in asked.queries])
            return classifier.fit_features(X, labels, more)

        taught = asked.queries if asked.transductive and HEADS[head].learns_from_unlabeled else []
        return self._fitted.get((asked.backbone, head, str(asked.classes), str(taught)), fit)

    def _checked(self, question: Any, with_queries: bool = True) -> Question:
        """The parts of a question, or a sentence that says what is wrong with it."""
        try:
            asked = Question.of(question, with_queries)
        except (TypeError, KeyError, AttributeError):
            raise ValueError("the question is not understood; reload the page") from None
        limits, names = self.limits, asked.names
        total = sum(len(keys) for _, keys in asked.classes) + len(asked.queries)
        if asked.backbone not in self.backbones or not set(asked.heads) <= set(HEADS):
            raise ValueError("this head or backbone is not known; reload the page")
        if with_queries and not asked.queries:
            raise ValueError("give a picture to classify")
        if len(names) > limits.classes or total > limits.pictures:
            raise ValueError(f"at most {limits.classes} classes and {limits.pictures} pictures are taken")
        if asked.model is not None:
            return asked
        if len(names) < 2 or not all(keys for _, keys in asked.classes):
            raise ValueError("give at least two classes with a picture each")
        if not asked.heads:
            raise ValueError("choose a head")
        if len(set(names)) < len(names) or not all(0 < len(name) <= limits.name_length for name in names):
            raise ValueError(f"give every class a name of its own, at most {limits.name_length} letters long")
        return asked


def _features(backbone: Backbone, content: bytes) -> np.ndarray:
    features, refused = embed(backbone, [content])
    if refused:
        raise PictureError(refused[0])
    return features[0]


def _answer(
    classifier: FewShotClassifier, names: list[str], X: np.ndarray, unfamiliar: bool
) -> dict[str, Any]:
    """Probabilities `[q, C]`, spread `[q, C]` and entropy `[q]`, columns in the order of `names`."""
    order = [classifier.classes_.astype(str).tolist().index(name) for name in names]
    each = classifier.head_.predict_proba_particles(X)[..., order]  # q P C
    p = each.mean(1)
    entropy = -(p * np.log(p.clip(np.finfo(float).tiny))).sum(1) / np.log(len(order))
    said = {
        "probabilities": p.tolist(),
        "spread": each.std(1).tolist(),
        "entropy": entropy.tolist(),
        "particles": each.shape[1],
    }
    if unfamiliar:
        try:
            said["unfamiliarity"] = unfamiliarity(classifier.head_, X).tolist()
        except ValueError:  # a head that cannot say
            said["unfamiliarity"] = None
    return said
