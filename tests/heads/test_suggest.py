"""Which examples to label next."""

import numpy as np
import pytest

from fewshot_dpkl.heads import suggest as module
from fewshot_dpkl.heads.suggest import suggest
from tests.heads.test_heads import task


@pytest.mark.parametrize("block", [7, 1024])
def test_suggestions_agree_with_a_loop_over_examples(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    x, _, xq, _ = task(way=3, shot=2, query=8, dimension=12, spread=0.8)
    z = np.concatenate([xq, x]).astype(float)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    z -= 0.8 * z.mean(0)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    points, labelled = z[:24], list(range(24, 30))
    found = suggest(xq, x, 5).tolist()
    assert len(set(found)) == 5
    for k, chosen in enumerate(found):  # of two that stand for each other alone, either is right
        total = {
            i: sum(max(float(a @ z[j]) for j in [*labelled, *found[:k], i]) for a in points)
            for i in set(range(24)) - set(found[:k])
        }
        assert total[chosen] == pytest.approx(max(total.values()), abs=1e-5)


def test_one_of_each_kind_that_nobody_has_shown_is_suggested():
    rng = np.random.default_rng(0)
    x = np.eye(6)[[0, 0, 1, 1]] + 0.01 * rng.normal(size=(4, 6))
    pool = np.concatenate([x, np.eye(6)[[4, 4, 5, 5]]]) + 0.01 * rng.normal(size=(8, 6))
    assert sorted((suggest(pool, x, 2) // 2).tolist()) == [2, 3]


@pytest.mark.parametrize("count", [0, 13])
def test_impossible_numbers_are_refused(count):
    x, _, xq, _ = task(way=3, query=4)
    with pytest.raises(ValueError, match=f"{count} of 12 examples cannot be suggested"):
        suggest(xq, x, count)
