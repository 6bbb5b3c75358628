"""How many labels suggestions save: accuracy against labels, suggested ones beside random ones.

    python benchmarks/study_suggest.py --features F.npz --tasks 100

Tasks of five classes begin with five labels of each. Five more examples at a time are labelled, of a pool of
at most 60 per class: those that `suggest` names, or random ones. Accuracy is on other examples, at most 20 of
each class. Then how many labels suggestions need for the accuracy that random choice has at ten per class, by
straight lines between the points of the mean curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from fewshot_dpkl import EpisodeSampler, FeatureSet, make_head
from fewshot_dpkl.evaluation.features import SHIPPED
from fewshot_dpkl.heads.suggest import suggest

WAY, FIRST, ROUND = 5, 5, 5


def curves(features: FeatureSet, head: str, tasks: int, most: int) -> np.ndarray:
    """Accuracies `[2, rounds + 1]`, of random and of suggested labels, at the end `most` per class."""
    least = int(np.bincount(features.labels).min())
    asked = min(20, (least - FIRST) // 3)
    pool = min(60, least - FIRST - asked)
    rounds = min(most - FIRST, pool) * WAY // ROUND
    sampler = EpisodeSampler(features, way=WAY, shot=FIRST, query=asked, unlabeled=pool)
    found = np.zeros((tasks, 2, rounds + 1))
    for number in tqdm(range(tasks), disable=None, leave=False):
        episode = sampler.draw(range(number, number + 1))
        support, query, pooled = (
            rows.reshape(-1) for rows in (episode.support, episode.query, episode.unlabeled)
        )
        pooled = np.random.default_rng(number).permutation(pooled)
        for suggested in (0, 1):
            left, known = pooled, support
            for k in range(rounds + 1):
                fitted = make_head(head).fit(features.features[known], features.labels[known])
                answers = fitted.predict(features.features[query])
                found[number, suggested, k] = (answers == features.labels[query]).mean()
                chosen = np.arange(ROUND)
                if suggested:
                    chosen = suggest(fitted, features.features[left], ROUND) if len(left) > ROUND else chosen
                known, left = np.append(known, left[chosen]), np.delete(left, chosen)
    return found.mean(0)


def labels_for(accuracy: float, curve: np.ndarray) -> float:
    """Labels after which a curve first has this accuracy; the last where it never has."""
    labels = WAY * FIRST + ROUND * np.arange(len(curve))
    above = np.flatnonzero(curve >= accuracy)
    if not len(above) or above[0] == 0:
        return float(labels[-1] if not len(above) else labels[0])
    k = above[0]
    return float(np.interp(accuracy, curve[k - 1 : k + 1], labels[k - 1 : k + 1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, nargs="+", default=[SHIPPED])
    parser.add_argument("--head", default="logreg")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--most", type=int, default=20, help="labels per class at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for path in arguments.features:
        random, suggested = curves(FeatureSet.load(path), arguments.head, arguments.tasks, arguments.most)
        goal = random[FIRST * WAY // ROUND]
        shown = [k for k in (0, 1, 2, 3, 5, 10, 15) if k < len(random)]
        print(f"{path.stem}: labels {[WAY * FIRST + ROUND * k for k in shown]}")
        for name, curve in (("random", random), ("suggested", suggested)):
            print(f"  {name:9} {' '.join(f'{100 * curve[k]:.1f}' for k in shown)}")
        needed = labels_for(goal, suggested)
        print(
            f"  {100 * goal:.1f} % needs {needed:.0f} suggested labels, {needed / 50:.2f} of 50", flush=True
        )


if __name__ == "__main__":
    main()
