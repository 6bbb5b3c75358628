"""Evaluation of heads over episodes: run them, pool their scores, compare them in pairs, class by class."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from fewshot_dpkl.evaluation.episodes import Episodes, EpisodeSampler
from fewshot_dpkl.evaluation.features import FeatureSet, html_table
from fewshot_dpkl.evaluation.metrics import Scores, expected_calibration_error, mean_interval, score
from fewshot_dpkl.heads import Head, as_head
from fewshot_dpkl.parallel import cores, on_every_core

if TYPE_CHECKING:
    import pandas


PER_EPISODE = (
    "accuracy", "nll", "brier", "accuracy_at_80", "unseen_auroc", "unseen_fpr95", "unfamiliar_auroc",
    "unfamiliar_fpr95", "refused",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class HeadResult:
    """What one head did, episode by episode; the figures are defined in `evaluation/metrics.py`.

    Attributes:
        accuracy: `[episodes]` share of right answers.
        nll: `[episodes]` mean negative log-likelihood of the true class.
        brier: `[episodes]` mean squared distance of the probabilities to the truth, summed over classes.
        accuracy_at_80: `[episodes]` accuracy on the 80 % of queries the head is surest of.
        calibration: `[episodes, 15, 3]`, for every confidence bin: count, sum of confidences, right answers.
        entropy: `[episodes, 2, 2]`, of right and of wrong answers: count, sum of entropies.
        confusion: `[episodes, way, way]`, queries of a class (row) that were given an answer (column).
        seconds: time spent in the head.
        unseen_auroc, unseen_fpr95: `[episodes]`, how well the top probability tells known from unseen
            classes, if asked.
        unfamiliar_auroc, unfamiliar_fpr95: the same by the head's unfamiliarity, if it has one.
        refused: `[episodes]`, share of known queries whose unfamiliarity is above 0.95.
        saw_unlabeled: whether the head has learnt from unlabelled examples of the episodes.

    Examples:
        >>> from fewshot_dpkl import CentroidHead, EpisodeSampler, FeatureSet, evaluate
        >>> features = FeatureSet.shipped()
        >>> result = evaluate({"centroid": CentroidHead()}, features, EpisodeSampler(features), 4)["centroid"]
        >>> result.accuracy.shape, result.calibration.shape
        ((4,), (4, 15, 3))
        >>> sorted(result.to_frame().columns)
        ['accuracy', 'accuracy_at_80', 'brier', 'nll']
    """

    accuracy: np.ndarray
    nll: np.ndarray
    brier: np.ndarray
    accuracy_at_80: np.ndarray
    calibration: np.ndarray
    entropy: np.ndarray
    confusion: np.ndarray
    seconds: float
    unseen_auroc: np.ndarray | None = None
    unseen_fpr95: np.ndarray | None = None
    unfamiliar_auroc: np.ndarray | None = None
    unfamiliar_fpr95: np.ndarray | None = None
    refused: np.ndarray | None = None
    saw_unlabeled: bool = False

    def __repr__(self) -> str:
        return f"HeadResult({', '.join(f'{name} {value}' for name, value in self._figures().items())})"

    def _repr_html_(self) -> str:
        figures = self._figures()
        return html_table(list(figures), [list(figures.values())])

    def _figures(self) -> dict[str, str]:
        """The figures as they are shown, accuracies in percent."""
        shown = {"episodes": str(len(self.accuracy))}
        for name, values in self.per_episode.items():
            percent = 100 if "accuracy" in name else 1
            mean, interval = (percent * value for value in mean_interval(values))
            digits = 2 if percent == 100 else 4
            shown[name] = f"{mean:.{digits}f} ± {interval:.{digits}f}"
        return {**shown, "ece": f"{self.ece:.4f}", "seconds": f"{self.seconds:.1f}"}

    @property
    def ece(self) -> float:
        """Expected calibration error over all queries, 15 equal bins of the top probability."""
        return expected_calibration_error(self.calibration.sum(0))

    @property
    def per_episode(self) -> dict[str, np.ndarray]:
        """The figures that have a value `[episodes]` for every episode, by name."""
        return {name: getattr(self, name) for name in PER_EPISODE if getattr(self, name) is not None}

    def summary(self) -> dict[str, Any]:
        """The figures of the results file; an entropy is None where there was no such answer."""
        figures: dict[str, Any] = {}
        for name, values in self.per_episode.items():
            interval = "ci95" if name == "accuracy" else f"{name}_ci95"
            figures[name], figures[interval] = mean_interval(values)
        for name, (count, total) in zip(("right", "wrong"), self.entropy.sum(0), strict=True):
            figures[f"entropy_{name}"] = float(total / count) if count else None
        bins = zip(("count", "confidence", "right"), self.calibration.sum(0).T.tolist(), strict=True)
        return {
            **figures,
            "ece": self.ece,
            "seconds": self.seconds,
            "episodes": len(self.accuracy),
            "saw_unlabeled": self.saw_unlabeled,
            "reliability": dict(bins),
        }

    def to_frame(self) -> pandas.DataFrame:
        """The figures of every episode as a pandas DataFrame: a row for each, a column for each figure."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_frame needs pandas; pip install 'fewshot-dpkl[pandas]'") from None
        return pandas.DataFrame(self.per_episode).rename_axis("episode")


def paired_difference(result: HeadResult, other: HeadResult, figure: str = "accuracy") -> tuple[float, float]:
    """Mean of `result` minus `other` on the same episodes, with its 95 % interval.

    figure: one of those with a value for every episode, see `HeadResult.per_episode`.

    Examples:
        >>> from fewshot_dpkl import EpisodeSampler, FeatureSet, evaluate, make_head, paired_difference
        >>> features = FeatureSet.shipped()
        >>> heads = {name: make_head(name) for name in ("nn", "centroid")}
        >>> results = evaluate(heads, features, EpisodeSampler(features), 30)
        >>> difference, interval = paired_difference(results["centroid"], results["nn"])
        >>> difference > interval  # clearly better, on the same 30 episodes
        True
    """
    return mean_interval(getattr(result, figure) - getattr(other, figure))


def paired_differences(results: Mapping[str, HeadResult]) -> list[dict[str, Any]]:
    """Every later head minus every earlier one, in all figures that have a value per episode."""
    rows = []
    for (earlier, other), (later, result) in combinations(results.items(), 2):
        row: dict[str, Any] = {"head": later, "minus": earlier}
        for name in (name for name in result.per_episode if name in other.per_episode):
            row[name], row[f"{name}_ci95"] = paired_difference(result, other, name)
        rows.append(row)
    return rows


def by_class(
    results: Mapping[str, HeadResult], classes: np.ndarray, class_names: Sequence[str]
) -> list[dict[str, Any]]:
    """For each class that was drawn: queries, and by head the accuracy and the commonest wrong answer.

    `classes` `[episodes, way]` are those of the episodes. The share of a wrong answer is of the queries in
    episodes that held both classes.
    """
    total = len(class_names)
    pairs = (classes[:, :, None], classes[:, None, :])  # true class, answer
    rows: dict[int, dict[str, Any]] = {
        c: {"name": class_names[c], "queries": 0, "accuracy": {}, "taken_for": {}} for c in np.unique(classes)
    }
    for name, result in results.items():
        times, chances = np.zeros((2, total, total))
        np.add.at(times, pairs, result.confusion)
        np.add.at(chances, pairs, result.confusion.sum(2, keepdims=True))
        for c, row in rows.items():
            row["queries"] = int(chances[c, c])
            row["accuracy"][name] = float(times[c, c] / max(chances[c, c], 1))
            wrong = np.where(np.arange(total) == c, 0, times[c])
            worst = int(wrong.argmax())
            row["taken_for"][name] = (
                {"class": class_names[worst], "share": float(wrong[worst] / chances[c, worst])}
                if wrong[worst]
                else None
            )
    return list(rows.values())


def evaluate(
    heads: Mapping[str, Any],
    features: FeatureSet,
    sampler: EpisodeSampler,
    episodes: int = 600,
    *,
    unseen: bool = False,
    batch_episodes: int | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str, np.ndarray], None] | None = None,
) -> dict[str, HeadResult]:
    """Run every head on the same episodes.

    Under `torchrun` every process takes its share of the episodes and all return the whole result. The
    result does not depend on `batch_episodes`, threads or processes, up to float rounding.

    Args:
        heads: by name; a `Head` each, or a scikit-learn classifier with `predict_proba`, of which every
            episode gets a clone, seeded by the episode's seed.
        batch_episodes: how many episodes are trained together (default: as many as suit the head).
        unseen: also ask, in every episode, as many queries as per class of a class that is not in its
            support set. Nothing else changes by it.
        progress: called after each batch with the head's name and the accuracies of the batch.

    Examples:
        >>> from sklearn.linear_model import LogisticRegression
        >>> from fewshot_dpkl import EpisodeSampler, FeatureSet, evaluate, make_head
        >>> features = FeatureSet.shipped()
        >>> heads = {"nn": make_head("nn"), "sklearn": LogisticRegression()}
        >>> results = evaluate(heads, features, EpisodeSampler(features, way=3, shot=2), episodes=4)
        >>> {name: result.summary()["episodes"] for name, result in results.items()}
        {'nn': 4, 'sklearn': 4}
    """
    if episodes < 1 or (batch_episodes is not None and batch_episodes < 1):
        raise ValueError(
            f"episodes is {episodes} and batch_episodes {batch_episodes}; both must be at least 1"
        )
    table = torch.as_tensor(np.asarray(features.features, np.float32), device=device)
    rank, world = process()
    share = np.arange(rank, episodes, world)
    workers = cores() if table.device.type == "cpu" else 1
    results = {}
    for name, head in {name: as_head(given, name) for name, given in heads.items()}.items():
        start = time.perf_counter()
        at_once = batch_episodes or head.episodes_at_once
        batches = sampler.batches(share, min(at_once, max(1, -(-len(share) // workers))), unseen=unseen)
        parts = [nothing(sampler.way, unseen, head.can_tell_unfamiliar)]
        for scores in on_every_core(partial(score_head, head, table), batches, workers):
            parts.append(scores)
            if progress:
                progress(name, scores["accuracy"])
        seconds = slowest(time.perf_counter() - start)
        whole = {key: gather(np.concatenate([part[key] for part in parts]), episodes) for key in parts[0]}
        saw = saw_unlabeled(head, sampler.transductive + sampler.unlabeled)
        results[name] = HeadResult(**whole, seconds=seconds, saw_unlabeled=saw)
    return results


@torch.no_grad()
def run_head(
    head: Head, table: Tensor, batch: Episodes
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Fit a head to a batch of episodes and ask it their queries.

    `table` `[N, D]` are the features on the device to use. The head sees the support set when it learns
    and the queries only afterwards; the unlabelled examples, which may be the queries, only if it can learn
    from such.

    Returns:
        Log-probabilities `[E, way, query, way]` of the queries and `[E, unseen, way]` of the unseen ones,
        asked apart so that no rounding of the first depends on the second; if there are such, also the
        unfamiliarities `[E, way·query]` and `[E, unseen]` of both, from a head that can tell.
    """
    episodes, way, shot = batch.support.shape

    def look_up(rows: np.ndarray) -> Tensor:
        index = torch.as_tensor(rows.ravel(), device=table.device)
        return table.index_select(0, index).unflatten(0, (episodes, -1))  # E rows D

    labels = torch.arange(way, device=table.device).repeat_interleave(shot).expand(episodes, -1)
    known = {"unlabeled": look_up(batch.unlabeled)} if saw_unlabeled(head, batch.unlabeled.shape[1]) else {}
    state = head.fit_episodes(look_up(batch.support), labels, batch.seeds.tolist(), **known)
    query = look_up(batch.query)
    log_p = head.log_proba_episodes(state, query).unflatten(1, (way, -1))
    if not batch.unseen.size:
        return log_p, log_p.new_empty(episodes, 0, way), None
    unseen, unfamiliarity = look_up(batch.unseen), None
    if head.can_tell_unfamiliar:
        both = (head.unfamiliarity_episodes(state, points) for points in (query, unseen))
        unfamiliarity = next(both), next(both)
    return log_p, head.log_proba_episodes(state, unseen), unfamiliarity


def saw_unlabeled(head: Head, number: int) -> bool:
    """Whether `head` learns from `number` unlabelled examples of an episode."""
    return number > 0 and head.learns_from_unlabeled


def score_head(head: Head, table: Tensor, batch: Episodes) -> Scores:
    """`run_head`, scored."""
    log_p, log_unseen, unfamiliarity = run_head(head, table, batch)
    truth = torch.as_tensor(batch.query_classes)
    return score(log_p, log_unseen if batch.unseen.size else None, truth, unfamiliarity)


def nothing(way: int, unseen: bool, unfamiliar: bool) -> Scores:
    """The scores of no episode, for a process that has none."""
    log_p, log_unseen = torch.empty(0, way, 1, way), torch.empty(0, 1, way) if unseen else None
    unfamiliarity = (torch.empty(0, way), torch.empty(0, 1)) if unseen and unfamiliar else None
    return score(log_p, log_unseen, unfamiliarity=unfamiliarity)


# Several processes: torch's launcher and process groups


def process() -> tuple[int, int]:
    """This process's number and how many there are."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def gather(mine: np.ndarray, total: int) -> np.ndarray:
    """Merge `[share, ...]` of all processes, process k holding rows k, k + world, ...: `[total, ...]`."""
    rank, world = process()
    if world == 1:
        return mine
    whole = torch.zeros(total, *mine.shape[1:], dtype=torch.float64)
    whole[rank::world] = torch.as_tensor(mine)
    distributed.all_reduce(whole)
    return whole.numpy()


def slowest(seconds: float) -> float:
    """The longest time any process took."""
    if process()[1] == 1:
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(longest, distributed.ReduceOp.MAX)
    return float(longest)
