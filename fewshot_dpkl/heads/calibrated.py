"""Past the paper: DPKL with probabilities to trust, on features that nobody tuned it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fewshot_dpkl.heads.base import State, unit, widest
from fewshot_dpkl.heads.bayesian import Validation
from fewshot_dpkl.heads.dpkl import DPKLHead, Kernel
from fewshot_dpkl.heads.familiar import distance_to_nearest, of_class_means, share_more_familiar
from fewshot_dpkl.heads.folds import draw_folds, each_fold, weigh
from fewshot_dpkl.heads.logistic import LogisticRegressionHead
from fewshot_dpkl.heads.means import COMMON_DIMENSIONS, ClassMeans, Geometry, class_means, geometry
from fewshot_dpkl.heads.training.particle import predictive
from fewshot_dpkl.heads.unlabelled import OF_UNLABELED, learnt_with, with_unlabeled

LEARNT = 4.5
"""What the learnt embedding's log-probabilities are multiplied by, before any fold is seen."""
LOGISTIC = 10.0
"""The same of logistic regression's logits at one shot."""
MEANS = 18.5
"""The same of -|x - mean|²/2, in units of the variance between classes and with many shots."""
OF_FEATURES = ("linear", "intercepts", "means", "offsets", "known")
"""In the state, what belongs to the feature vector itself."""
DEVIATION = 0.3
"""Of the prior on the logarithms of the two weights."""


@dataclass(eq=False, repr=False, kw_only=True)
class CalibratedDPKLHead(DPKLHead):
    """DPKL beside the feature vector itself, both weighed by what they say of examples held out.

        p(y = c | x)  ∝  mean over particles p of exp(w₁ log ρ_c^p(x) + w₂ s_c(x))

    ρ^p is DPKL's: particles of the embedding by functional gradient descent, particles of the class weights
    by SVGD, in closed form. s is what the feature vector, scaled to length one, says by class means and
    logistic regression. The temperature and the share of the learnt embedding are in the two weights. They
    come from the support set alone: from the log-likelihood of examples held out in folds, and a prior that
    is a function of the number of examples and of two numbers without a scale (`means.Geometry`):

    - the more feature vectors have in common (mean cosine between classes), the more is to be learnt: it is
      the prior share of the learnt embedding, and in s that of logistic regression;
    - the more dimensions they vary in, the less can a score be chance: the temperature grows with the cube
      root.

    With one example of every class there are no folds, and the prior decides. There is nothing to set; the
    parameters are those of `DPKLHead`.

    Args:
        folds: at most so many; fewer where no class has as many examples.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import CalibratedDPKLHead
        >>> X, y = np.eye(3).repeat(4, 0), np.repeat(["ant", "bee", "fly"], 4)
        >>> head = CalibratedDPKLHead(epochs=20, latent=16, learning_rate=0.1).fit(X, y)
        >>> head.predict(X[::4]).tolist()
        ['ant', 'bee', 'fly']
        >>> (head.unfamiliarity(np.array([X[0], [1, 1, 1]])) > 0.95).tolist()
        [False, True]
    """

    name = "dpkl-calibrated"
    can_tell_unfamiliar = True

    kernel: Kernel = "exact"
    folds: int = 3
    alpha: float = field(default=0.0, init=False)  # unlabelled examples are learnt from by `unlabelled.py`

    @torch.no_grad()
    def fit_episodes(
        self,
        support: Tensor,
        labels: Tensor,
        seeds: Sequence[int],
        unlabeled: Tensor | None = None,
        validation: Validation | None = None,
        on_check: Callable[[int], None] | None = None,
    ) -> State:
        state = super().fit_episodes(support, labels, seeds, validation=validation, on_check=on_check)
        points = unit(support)
        classes = class_means(points, labels)
        seen = geometry(widest(points), labels, class_means(widest(points), labels))
        weights = self._weights(support, labels, seeds, seen).to(support)
        own = feature_weights(support, labels, classes, seen)
        state = {
            **state,
            "temperature": LEARNT * weights[:, 0],  # E
            "linear": weights[:, 1, None, None] * own[0],  # E C D
            "intercepts": weights[:, 1, None] * own[1],  # E C
            "means": classes.means,
            "offsets": classes.offsets,
            "known": of_class_means(points, labels, classes, seen).to(support),  # E 2
        }
        return learnt_with(self, state, support, labels, unlabeled)

    def _weights(self, support: Tensor, labels: Tensor, seeds: Sequence[int], seen: Geometry) -> Tensor:
        """Of the learnt embedding and of the feature vector, `[E, 2]` in float64, by folds and prior."""
        share = seen.cosine.clamp(0.02, 0.98)
        temperature = (seen.dimensions / COMMON_DIMENSIONS) ** (1 / 3)
        centre = (torch.stack([share, 1 - share], -1) * temperature[:, None]).log()
        folds = draw_folds(labels, seeds, self.folds)
        scores = centre.new_zeros(len(labels), 2, labels.shape[1], int(labels.max()) + 1)
        for episodes, kept, out in each_fold(folds, self.episodes_at_once):
            rows = episodes[:, None]
            x, y, asked = support[rows, kept], labels[rows, kept], support[rows, out]
            state = super().fit_episodes(x, y, [seeds[e] for e in episodes.tolist()])
            linear, intercepts = feature_weights(x, y, class_means(unit(x), y), seen.of(episodes))
            learnt = LEARNT * predictive(super().particle_log_proba_episodes(state, asked))
            own = unit(asked) @ linear.transpose(-1, -2) + intercepts[:, None]
            scores[rows, 0, out], scores[rows, 1, out] = learnt.to(scores), own.to(scores)
        return weigh(scores, labels, folds >= 0, centre, DEVIATION)

    def whole(self, state: State) -> State:
        kept = {key: state[key] for key in ("temperature", *OF_FEATURES, *OF_UNLABELED) if key in state}
        return {**super().whole(state), **kept}

    def particle_log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        learnt = super().particle_log_proba_episodes(state, query)  # E q P C
        own = unit(query) @ state["linear"].transpose(-1, -2) + state["intercepts"][:, None]  # E q C
        by_particle = (state["temperature"][:, None, None, None] * learnt + own[:, :, None]).log_softmax(-1)
        return with_unlabeled(state, query, by_particle)

    def log_proba_episodes(self, state: State, query: Tensor) -> Tensor:
        return predictive(self.particle_log_proba_episodes(state, query))

    def unfamiliarity_episodes(self, state: State, query: Tensor) -> Tensor:
        points = unit(query)
        scores = points @ state["means"].transpose(-1, -2) - state["offsets"][:, None] / 2
        return share_more_familiar(distance_to_nearest(scores, points), state["known"])


def feature_weights(
    support: Tensor, labels: Tensor, classes: ClassMeans, seen: Geometry
) -> tuple[Tensor, Tensor]:
    """What the feature vector itself says: linear weights `[E, C, D]` and intercepts `[E, C]`.

    Class means are right for features that have nothing in common between classes; the more they have, the
    larger the share of logistic regression, which learns to ignore it.
    """
    logistic = LogisticRegressionHead().fit_episodes(support, labels, [])
    share = seen.cosine.to(support)
    of_logistic = share * LOGISTIC * classes.inverse_shot.sqrt()
    of_means = (1 - share) * MEANS / (1 + 2 * classes.inverse_shot) / seen.variance.to(support)
    linear = of_logistic[:, None, None] * logistic["class_weights"] + of_means[:, None, None] * classes.means
    return linear, of_logistic[:, None] * logistic["intercepts"] - of_means[:, None] * classes.offsets / 2
