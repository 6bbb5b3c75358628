"""Evaluation of heads over episodes: accuracy with its interval, NLL, calibration, paired differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from fewshot_dpkl.episodes import Episodes, EpisodeSampler
from fewshot_dpkl.features import FeatureSet
from fewshot_dpkl.heads import Head

ECE_BINS = 15


@dataclass(frozen=True)
class HeadResult:
    """What one head did, episode by episode.

    Attributes:
        accuracy: `[episodes]` share of right answers.
        nll: `[episodes]` mean negative log-likelihood of the true class.
        calibration: `[episodes, 15, 3]`, for every confidence bin: count, sum of confidences, right answers.
        seconds: time spent in the head.
    """

    accuracy: np.ndarray
    nll: np.ndarray
    calibration: np.ndarray
    seconds: float

    @property
    def ece(self) -> float:
        """Expected calibration error over all queries, 15 equal bins of the top probability."""
        count, confidence, right = self.calibration.sum(0).T
        return float(np.abs(confidence - right).sum() / count.sum())

    def summary(self) -> dict[str, float | int]:
        """The figures of the results file."""
        mean, interval = mean_interval(self.accuracy)
        return {
            "accuracy": mean,
            "ci95": interval,
            "nll": float(self.nll.mean()),
            "ece": self.ece,
            "seconds": self.seconds,
            "episodes": len(self.accuracy),
        }


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The mean and half the width of its 95 % interval, 1.96 σ / √episodes, as the field reports it."""
    return float(values.mean()), float(1.96 * values.std() / len(values) ** 0.5)


def paired_difference(result: HeadResult, other: HeadResult, figure: str = "accuracy") -> tuple[float, float]:
    """Mean of `result` minus `other` on the same episodes, with its 95 % interval; figure: accuracy, nll."""
    return mean_interval(getattr(result, figure) - getattr(other, figure))


def evaluate(
    heads: Mapping[str, Head],
    features: FeatureSet,
    sampler: EpisodeSampler,
    episodes: int = 600,
    *,
    batch_episodes: int = 12,
    device: torch.device | str = "cpu",
    progress: Callable[[str, np.ndarray], None] | None = None,
) -> dict[str, HeadResult]:
    """Run every head on the same episodes.

    Under `torchrun` every process takes its share of the episodes and all return the whole result. The
    result does not depend on `batch_episodes`, threads or processes, up to float rounding.

    Args:
        progress: called after each batch with the head's name and the accuracies of the batch.
    """
    if episodes < 1 or batch_episodes < 1:
        raise ValueError(
            f"episodes is {episodes} and batch_episodes {batch_episodes}; both must be at least 1"
        )
    table = torch.as_tensor(np.asarray(features.features, np.float32), device=device)
    rank, world = process()
    share = np.arange(rank, episodes, world)
    workers = torch.get_num_threads() if table.device.type == "cpu" else 1
    size = min(batch_episodes, max(1, -(-len(share) // workers)))
    batches = list(sampler.batches(share, size))
    results = {}
    for name, head in heads.items():
        start = time.perf_counter()
        parts = []
        for scores in in_threads(partial(score_head, head, table), batches, workers):
            parts.append(scores)
            if progress:
                progress(name, scores[0])
        seconds = time.perf_counter() - start
        accuracy, nll, calibration = (gather(column, episodes) for column in columns(parts))
        results[name] = HeadResult(accuracy, nll, calibration, slowest(seconds))
    return results


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map` over `workers` threads of one core each.

    A batch of episodes is a long chain of operations on small tensors: cutting every one of them in two for
    two cores costs more than it saves, two chains side by side do not.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(function, items)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def run_head(head: Head, table: Tensor, batch: Episodes) -> Tensor:
    """Fit a head to a batch of episodes; log-probabilities `[E, way, query, way]` of their queries.

    `table` `[N, D]` are the features on the device to use. The head sees the support set when it learns
    and the queries only afterwards.
    """
    episodes, way, shot = batch.support.shape
    support = table[torch.as_tensor(batch.support.reshape(episodes, -1), device=table.device)]
    query = table[torch.as_tensor(batch.query.reshape(episodes, -1), device=table.device)]
    labels = torch.arange(way, device=table.device).repeat_interleave(shot).expand(episodes, -1)
    state = head.fit_episodes(support, labels, batch.seeds.tolist())
    return head.log_proba_episodes(state, query).unflatten(1, (way, -1))


Scores = tuple[np.ndarray, np.ndarray, np.ndarray]


def score_head(head: Head, table: Tensor, batch: Episodes) -> Scores:
    """`run_head`, scored."""
    return score(run_head(head, table, batch))


def score(log_p: Tensor) -> Scores:
    """Log-probabilities `[E, way, query, way]` to accuracy `[E]`, NLL `[E]`, calibration `[E, 15, 3]`."""
    log_p = log_p.cpu().double()
    way = log_p.shape[1]
    truth = torch.arange(way)[:, None, None]
    right = (log_p.argmax(-1, keepdim=True) == truth).double().flatten(1)  # E way·query
    nll = -log_p.gather(-1, truth.expand(*log_p.shape[:-1], 1)).flatten(1)
    confidence = log_p.exp().amax(-1).flatten(1)
    bins = (confidence * ECE_BINS).ceil().long().sub(1).clamp(0, ECE_BINS - 1)
    calibration = torch.zeros(len(log_p), ECE_BINS, 3, dtype=torch.float64)
    for column, values in enumerate((torch.ones_like(confidence), confidence, right)):
        calibration[..., column].scatter_add_(1, bins, values)
    return right.mean(1).numpy(), nll.mean(1).numpy(), calibration.numpy()


def columns(parts: Iterable[Scores]) -> Scores:
    """The scores of all batches, end to end (of none, if this process had no episode)."""
    none = (np.empty(0), np.empty(0), np.empty((0, ECE_BINS, 3)))
    accuracy, nll, calibration = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    return accuracy, nll, calibration


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
