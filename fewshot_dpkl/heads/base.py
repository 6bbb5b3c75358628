"""What every head is: a classifier of a batch of episodes, seen one at a time by scikit-learn."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fewshot_dpkl.heads.saved import write_head

State = dict[str, Tensor]
"""What a head has learnt, each tensor with the episodes first: `[E, ...]`."""


class Head(ClassifierMixin, BaseEstimator):
    """A few-shot classifier on frozen features.

    A head is written once, for a batch of E episodes, as two functions: `fit_episodes` and
    `log_proba_episodes`. `fit`, `predict` and `predict_proba` are their view for E = 1.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import make_head
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> head = make_head("centroid").fit(X, y)
        >>> head.predict_proba(X[:2]).shape, head.classes_.tolist()
        ((2, 3), ['ant', 'bee', 'fly'])
    """

    name: str  # on the command line, in results and in saved files
    episodes_at_once = 48
    """How many episodes suit a core: more share the cost of every call, fewer stay in its cache."""
    learns_from_unlabeled = False
    """Whether `fit_episodes` and `fit` take `unlabeled` examples: `[E, u, D]` and `[u, D]`."""

    def fit_episodes(self, support: Tensor, labels: Tensor, seeds: Sequence[int]) -> State:
        """Learn from E support sets at once.

        Args:
            support: `[E, n, D]` float features.
            labels: `[E, n]` class numbers 0..C-1, every class present in every episode.
            seeds: E integers; all randomness of an episode follows from its own seed, so the result
                does not depend on which episodes are learnt together (up to float rounding).
        """
        raise NotImplementedError

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        """Log-probabilities `[E, q, C]` of the queries `[E, q, D]`, each row on its own."""
        raise NotImplementedError

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        """The same from each of P posterior particles, `[E, q, P, C]`; P = 1 for a head that keeps none."""
        return self.log_proba_episodes(state, query)[:, :, None]

    def whole(self, state: State) -> State:
        """`state` as a single fitted head keeps it, where episodes in their hundreds keep less."""
        return state

    can_tell_unfamiliar = False
    """Whether it has an `unfamiliarity`."""

    def unfamiliarity_episodes(self, state: State, query: Tensor) -> Tensor:
        """How unfamiliar the queries `[E, q, D]` are, `[E, q]` in [0, 1], each on its own.

        It is the estimated share of known examples that look more familiar: who refuses answers where it is
        above 0.95 refuses about 5 % of the queries of known classes, whatever the features.
        """
        raise NotImplementedError(
            f"the head {self.name} cannot say how unfamiliar an example is; use dpkl-calibrated or nn"
        )

    # scikit-learn's view: one episode

    def fit(
        self, X: ArrayLike | Tensor, y: ArrayLike | Tensor, unlabeled: ArrayLike | Tensor | None = None
    ) -> Head:
        """Learn from one support set: `X` `[n, D]`, `y` `[n]` labels of any type.

        Heads with `learns_from_unlabeled` also learn from further examples `unlabeled` `[u, D]` of the same
        kind, whose class nobody has said.
        """
        features, y_array = validate_data(self, _to_numpy(X), _to_numpy(y), dtype=np.float32)
        check_classification_targets(y_array)
        self.classes_, first, codes = np.unique(y_array, return_index=True, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"the support set has one class only ({self.classes_[0]!r}); a classifier needs at least two"
            )
        # Classes are numbered inside by first appearance, so that renaming them renames the predictions.
        self._order = np.argsort(np.argsort(first))  # inside number of each sorted class
        support = torch.as_tensor(features, device=_device_of(X))[None]
        labels = torch.as_tensor(self._order[codes.ravel()], device=support.device)[None]
        known = {} if unlabeled is None else self._unlabeled(unlabeled, support)
        state = self.whole(self.fit_episodes(support, labels, [self._seed()], **known))
        self.state_ = {key: value.contiguous() for key, value in state.items()}  # as it will be read back
        return self

    def _unlabeled(self, unlabeled: ArrayLike | Tensor, support: Tensor) -> dict[str, Tensor]:
        """Unlabelled examples as `fit_episodes` takes them; none of them are as good as not given."""
        if not self.learns_from_unlabeled:
            raise ValueError(f"head {self.name} cannot learn from unlabelled examples; fit it without")
        given = _to_numpy(unlabeled)
        if not len(given):
            return {}
        features = validate_data(self, given, dtype=np.float32, reset=False)
        return {"unlabeled": torch.as_tensor(features, device=support.device)[None]}

    def predict_log_proba(self, X: ArrayLike | Tensor) -> np.ndarray:
        """Log-probabilities `[q, C]`, columns in the order of `classes_`."""
        return self._log_proba(self.log_proba_episodes, X)

    def predict_proba_particles(self, X: ArrayLike | Tensor) -> np.ndarray:
        """What each of P posterior particles says, `[q, P, C]`: their spread is the head's own doubt.

        `predict_proba` is their mean; heads without particles give `[q, 1, C]`.
        """
        return np.exp(self._log_proba(self.particle_log_proba_episodes, X))

    def _log_proba(self, log_proba: Callable[[State, Tensor], Tensor], X: ArrayLike | Tensor) -> np.ndarray:
        """`log_proba` `[1, q, ..., C]` of the fitted state and `X`, columns in the order of `classes_`."""
        inside = self._ask(log_proba, X)
        return inside.log_softmax(-1).numpy()[..., self._order]

    def unfamiliarity(self, X: ArrayLike | Tensor) -> np.ndarray:
        """How unfamiliar each row of `X` `[q, D]` is, `[q]` in [0, 1]; see `unfamiliarity_episodes`."""
        return self._ask(self.unfamiliarity_episodes, X).numpy()

    def _ask(self, answer: Callable[[State, Tensor], Tensor], X: ArrayLike | Tensor) -> Tensor:
        """`answer` `[1, q, ...]` of the fitted state and `X`, in float64 on the CPU: `[q, ...]`."""
        check_is_fitted(self, "state_")
        features = validate_data(self, _to_numpy(X), dtype=np.float32, reset=False)
        device = next(iter(self.state_.values())).device
        # In float64, so that a row's answer does not depend on the rows beside it.
        state = {
            key: widest(value) if value.is_floating_point() else value for key, value in self.state_.items()
        }
        with torch.no_grad():
            return answer(state, widest(torch.as_tensor(features, device=device))[None])[0].cpu().double()

    def predict_proba(self, X: ArrayLike | Tensor) -> np.ndarray:
        """Probabilities `[q, C]`, positive and summing to one, columns in the order of `classes_`."""
        tiny = np.finfo(np.float64).tiny
        probabilities = np.exp(self.predict_log_proba(X)).clip(tiny)
        return probabilities / probabilities.sum(1, keepdims=True)

    def predict(self, X: ArrayLike | Tensor) -> np.ndarray:
        """The most probable class of each row of `X` `[q, D]`: `[q]`."""
        best = self.predict_log_proba(X).argmax(1)
        return self.classes_[best]

    def _seed(self) -> int:
        random_state = getattr(self, "random_state", 0)
        if isinstance(random_state, (int, np.integer)):
            return int(random_state)
        return int(check_random_state(random_state).randint(2**31 - 1))

    # one file, no pickle

    def save(self, path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
        """Write the fitted head to one safetensors file; `load_head` reads it back.

        `metadata` is kept beside the head's own description.
        """
        check_is_fitted(self, "state_")
        write_head(self, path, metadata or {})


def make(name: str, made_by: Any, parameters: dict[str, Any]) -> Head:
    """A new head of the class `made_by`, with a sentence for unknown parameters and other classes."""
    if not (isinstance(made_by, type) and issubclass(made_by, Head)):
        raise ValueError(f"{name} is no fewshot_dpkl.Head; fit it by itself, or give it to evaluate()")
    known = inspect.signature(made_by).parameters
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(
                f"head {name!r} has no parameter {parameter!r}; it takes {', '.join(known) or 'none'}"
            )
    return made_by(**parameters)


def unit(x: Tensor) -> Tensor:
    """Rows of `x` `[..., d]` scaled to length one (rows of zeros stay zero)."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def widest(x: Tensor) -> Tensor:
    """`x` in float64, or in float32 on devices that know no float64."""
    return x.float() if x.device.type == "mps" else x.double()


def one_hot(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """`[E, n]` class numbers to `[E, n, C]`."""
    return torch.nn.functional.one_hot(labels).to(dtype)


def _to_numpy(x: ArrayLike | Tensor) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else x


def _device_of(x: ArrayLike | Tensor) -> torch.device:
    return x.device if isinstance(x, Tensor) else torch.device("cpu")
