"""Which examples to label next."""

import numpy as np
import pytest

from fewshot_dpkl.heads.suggest import NOISE, suggest
from tests.heads.test_heads import quick, task


def test_suggestions_agree_with_a_loop_over_posterior_covariances():
    x, y, xq, _ = task(way=3, shot=2, query=8, dimension=12, spread=0.8)
    head = quick("logreg").fit(x, y)
    p = head.predict_proba(xq)
    doubt = -(p * np.log(p)).sum(1)
    z = xq / np.linalg.norm(xq, axis=1, keepdims=True)
    z = z - 0.8 * z.mean(0)
    z = (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(float)
    taken = []
    for _ in range(5):
        best = None
        for i in set(range(len(z))) - set(taken):
            rows = [*taken, i]
            gram = z[rows] @ z[rows].T + NOISE * np.eye(len(rows))
            explained = ((z @ z[rows].T) * np.linalg.solve(gram, z[rows] @ z.T).T).sum(1)
            left = doubt @ (1 - explained)
            best = min(best, (left, i)) if best else (left, i)
        taken.append(best[1])
    assert suggest(head, xq, 5).tolist() == taken


def test_an_answer_that_is_sure_is_not_asked_for_where_others_are_not():
    rng = np.random.default_rng(0)
    x, y = np.eye(6)[[0, 0, 1, 1]] + 0.01 * rng.normal(size=(4, 6)), np.array([0, 0, 1, 1])
    pool = np.concatenate([x, np.eye(6)[[4, 4, 5, 5]]]) + 0.01 * rng.normal(size=(8, 6))
    chosen = suggest(quick("logreg", C=1e4).fit(x, y), pool, 2)
    assert sorted(np.unique(chosen // 2).tolist()) == [2, 3]  # one of each kind that nobody has shown


@pytest.mark.parametrize("count", [0, 13])
def test_impossible_numbers_are_refused(count):
    x, y, xq, _ = task(way=3, query=4)
    with pytest.raises(ValueError, match=f"{count} of 12 examples cannot be suggested"):
        suggest(quick("centroid").fit(x, y), xq, count)
