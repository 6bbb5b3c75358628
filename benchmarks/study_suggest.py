"""How many labels suggestions save: accuracy against labels, suggested ones beside random ones.

    python benchmarks/study_suggest.py --mini mini-val.npz --cub cub-val.npz --root FOLDER --first 1 5

Sets and files as in study_calibration.py. Tasks of five classes begin with --first labels of each. Five more
examples at a time are labelled, of a pool of at most 60 per class: those that `suggest` names, or random
ones. Accuracy is on other examples, at most 20 of each class. Prints both mean curves as a plot (o random,
+ suggested, * both), then how many labels each needs for the accuracy that random choice has at ten per
class, by straight lines between the points.
"""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.study_calibration import feature_sets, parser_of_sets
from fewshot_dpkl import EpisodeSampler, FeatureSet, make_head
from fewshot_dpkl.heads.suggest import suggest

WAY, ROUND, GOAL = 5, 5, 10  # GOAL: labels per class whose accuracy, by random choice, is to be reached
HEIGHT = 8  # of the plot, in lines


def curves(features: FeatureSet, head: str, tasks: int, first: int, most: int, seed: int) -> np.ndarray:
    """Accuracies `[2, rounds + 1]`, of random and of suggested labels, at the end `most` per class."""
    least = int(np.bincount(features.labels).min())
    asked = min(20, (least - first) // 3)
    pool = min(60, least - first - asked)
    rounds = min(most - first, pool) * WAY // ROUND
    sampler = EpisodeSampler(features, way=WAY, shot=first, query=asked, unlabeled=pool, seed=seed)
    episodes = sampler.draw(range(tasks))
    support, query, pooled = (
        rows.reshape(tasks, -1) for rows in (episodes.support, episodes.query, episodes.unlabeled)
    )
    pooled = np.random.default_rng(seed).permuted(pooled, axis=1)
    found = np.empty((2, rounds + 1))
    for suggested in (0, 1):
        left, known = pooled, support
        for k in tqdm(range(rounds + 1), disable=None, leave=False):
            found[suggested, k] = accuracy(features, head, episodes.classes, known, query)
            chosen = np.tile(np.arange(min(ROUND, left.shape[1])), (tasks, 1))
            if suggested and left.shape[1] > ROUND:
                of = features.features
                chosen = np.array([suggest(of[a], of[b], ROUND) for a, b in zip(left, known, strict=True)])
            known = np.concatenate([known, np.take_along_axis(left, chosen, 1)], 1)
            kept = np.ones(left.shape, bool)
            np.put_along_axis(kept, chosen, False, 1)
            left = left[kept].reshape(tasks, -1)
    return found


def accuracy(
    features: FeatureSet, head: str, classes: np.ndarray, known: np.ndarray, query: np.ndarray
) -> float:
    """Mean over tasks of `classes` `[E, way]`, labelled rows `[E, n]` and asked ones `[E, q]`."""
    right = []
    made = make_head(head)
    for start in range(0, len(known), made.episodes_at_once):
        tasks = slice(start, start + made.episodes_at_once)
        support, asked = (torch.as_tensor(features.features[rows[tasks]]).float() for rows in (known, query))
        numbers = [
            (features.labels[rows[tasks]][..., None] == classes[tasks, None]).argmax(-1)
            for rows in (known, query)
        ]
        seeds = list(range(start, start + len(support)))
        state = made.fit_episodes(support, torch.as_tensor(numbers[0]), seeds)
        answers = made.log_proba_episodes(state, asked).argmax(-1).numpy()
        right.append((answers == numbers[1]).mean(1))
    return float(np.concatenate(right).mean())


def labels_for(goal: float, curve: np.ndarray, first: int) -> float:
    """Labels after which a curve first has this accuracy; infinite where it never has."""
    labels = WAY * first + ROUND * np.arange(len(curve))
    above = np.flatnonzero(curve >= goal)
    if not len(above):
        return np.inf
    k = above[0]
    return float(np.interp(goal, curve[k - 1 : k + 1], labels[k - 1 : k + 1]) if k else labels[0])


def plot(curves: np.ndarray, first: int) -> str:
    """Both curves in HEIGHT lines of text, a column for every five labels."""
    low, high = curves.min(), curves.max()
    lines = np.rint((curves - low) / (high - low) * (HEIGHT - 1)).astype(int)
    text = []
    for line in range(HEIGHT - 1, -1, -1):
        row = "".join(" o+*"[int(a == line) + 2 * int(b == line)] + "  " for a, b in lines.T)
        text.append(f"{100 * (low + (high - low) * line / (HEIGHT - 1)):5.1f} |{row}".rstrip())
    labels = [str(WAY * first + ROUND * k).ljust(3) for k in range(curves.shape[1])]
    return "\n".join([*text, "labels " + "".join(labels)])


def main() -> None:
    parser = parser_of_sets(__doc__)
    parser.add_argument("--head", default="logreg")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--first", type=int, nargs="+", default=[1], help="labels per class at the beginning")
    parser.add_argument("--most", type=int, default=20, help="labels per class at the end")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for first in arguments.first:
        table = []
        for name, features in feature_sets(arguments).items():
            found = curves(features, arguments.head, arguments.tasks, first, arguments.most, arguments.seed)
            print(f"\n{name}, from {first} per class\n\n{plot(found, first)}", flush=True)
            goal = found[0, (GOAL - first) * WAY // ROUND]
            needed = labels_for(goal, found[1], first)
            shown = [k for k in (5, 10, 15, 20) if first <= k <= arguments.most]
            both = [
                " / ".join(f"{100 * curve[(k - first) * WAY // ROUND]:.1f}" for curve in found) for k in shown
            ]
            table.append(f"| {name} | " + " | ".join([*both, f"{needed:.0f}", f"{needed / GOAL / WAY:.2f}"]))
        print(f"\nFrom {first} per class, {arguments.head}, {arguments.tasks} tasks: random / suggested\n")
        print("| | " + " | ".join(f"{k} per class" for k in shown) + " | labels needed | share |")
        print("|---" * (len(shown) + 3) + "|")
        print("\n".join(f"{line} |" for line in table), flush=True)


if __name__ == "__main__":
    main()
