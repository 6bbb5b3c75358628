import numpy as np
import pytest
import torch

from fewshot_dpkl import EpisodeSampler, evaluate, paired_difference
from fewshot_dpkl.evaluation import mean_interval, run_head, score
from tests.test_heads import quick


def test_scores_agree_with_loops():
    log_p = torch.randn(3, 4, 6, 4, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    accuracy, nll, calibration = score(log_p)
    confidences, rights = [], []
    for e in range(3):
        right, losses = [], []
        for c in range(4):
            for row in log_p[e, c].double():
                right.append(float(row.argmax() == c))
                losses.append(-float(row[c]))
                confidences.append(float(row.exp().max()))
        rights += right
        assert accuracy[e] == pytest.approx(np.mean(right))
        assert nll[e] == pytest.approx(np.mean(losses))
    # Expected calibration error over 15 equal bins (lower, upper], by its definition
    confidences, rights, ece = np.array(confidences), np.array(rights), 0.0
    for i in range(15):
        inside = (confidences > i / 15) & (confidences <= (i + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(confidences[inside].mean() - rights[inside].mean())
    count, confidence, right = calibration.sum(0).T
    assert np.abs(confidence - right).sum() / count.sum() == pytest.approx(ece)


def test_interval_is_the_one_of_the_field():
    values = np.array([0.2, 0.4, 0.9])
    assert mean_interval(values) == (pytest.approx(0.5), pytest.approx(1.96 * values.std() / 3**0.5))


def evaluated(features, **settings):
    heads = {"nn": quick("nn"), "dpkl": quick("dpkl", epochs=4)}
    return evaluate(heads, features, EpisodeSampler(features, way=3, shot=2, query=5), 10, **settings)


def test_result_does_not_depend_on_batch_size_or_threads(clusters):
    alone = evaluated(clusters, batch_episodes=1)
    for batch, threads in ((3, 1), (10, 2)):
        torch.set_num_threads(threads)
        other = evaluated(clusters, batch_episodes=batch)
        assert torch.get_num_threads() == threads
        for name in alone:
            assert np.array_equal(other[name].accuracy, alone[name].accuracy)
            np.testing.assert_allclose(other[name].nll, alone[name].nll, atol=1e-4)


def test_paired_difference_is_the_interval_of_the_differences(clusters):
    results = evaluated(clusters)
    rows = results["dpkl"].accuracy - results["nn"].accuracy
    assert paired_difference(results["dpkl"], results["nn"]) == mean_interval(rows)
    assert paired_difference(results["nn"], results["nn"], "nll") == (0.0, 0.0)


def test_no_head_sees_a_query_when_it_learns(clusters):
    """Changing the queries of one class must not change the answers to the others."""
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=5)
    batch = sampler.draw(range(2))
    for name in ("cosine", "blr", "dpkl", "logreg"):
        table = torch.tensor(clusters.features)
        before = run_head(quick(name), table, batch)
        changed = table.clone()
        rows = np.setdiff1d(batch.query[:, 0], batch.support)
        changed[rows] = changed[rows].flip(0) * 3
        after = run_head(quick(name), changed, batch)
        others = ~np.isin(batch.query[:, 1:], rows)
        torch.testing.assert_close(
            after[:, 1:][torch.tensor(others)], before[:, 1:][torch.tensor(others)], atol=1e-5, rtol=0
        )


def test_episode_numbers_must_be_positive(clusters):
    with pytest.raises(ValueError, match="episodes is 0"):
        evaluate({}, clusters, EpisodeSampler(clusters), 0)
