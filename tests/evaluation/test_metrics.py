"""Every figure against scikit-learn or a plain loop over the queries in float64."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, confusion_matrix, log_loss, roc_auc_score

from fewshot_dpkl.evaluation.metrics import expected_calibration_error, mean_interval, score

EPISODES, WAY, QUERY = 3, 4, 6


def answers(scale=2.0, seed=0):
    """Log-probabilities of known and of unseen queries; a larger scale is surer (and has exact ones)."""
    draw = torch.Generator().manual_seed(seed)
    known = torch.randn(EPISODES, WAY, QUERY, WAY, generator=draw) + torch.eye(WAY)[:, None]
    unseen = torch.randn(EPISODES, QUERY, WAY, generator=draw)
    return known.mul(scale).log_softmax(-1), unseen.mul(scale).log_softmax(-1)


@pytest.mark.parametrize("scale", [0.5, 2.0, 100.0])
def test_figures_of_an_episode_agree_with_scikit_learn(scale):
    known, unseen = answers(scale)
    scores = score(known, unseen)
    truth = np.repeat(np.arange(WAY), QUERY)
    for e in range(EPISODES):
        log_p = known[e].double().reshape(-1, WAY).numpy()
        p = np.exp(log_p)
        answer = p.argmax(1)
        assert scores["accuracy"][e] == pytest.approx(accuracy_score(truth, answer))
        if scale < 100:  # scikit-learn cuts off small probabilities
            probabilities = p / p.sum(1, keepdims=True)
            assert scores["nll"][e] == pytest.approx(log_loss(truth, probabilities), rel=1e-5)
        assert scores["nll"][e] == pytest.approx(-log_p[np.arange(len(truth)), truth].mean())
        brier = sum(brier_score_loss(truth == c, p[:, c].clip(0, 1)) for c in range(WAY))
        assert scores["brier"][e] == pytest.approx(brier, rel=1e-5)
        np.testing.assert_array_equal(scores["confusion"][e], confusion_matrix(truth, answer))
        top = np.concatenate([p.max(1), np.exp(unseen[e].double().numpy()).max(1)])
        is_known = np.repeat([1, 0], [WAY * QUERY, QUERY])
        assert scores["unseen_auroc"][e] == pytest.approx(roc_auc_score(is_known, top))


def test_pooled_figures_agree_with_loops():
    known, _ = answers()
    scores = score(known)
    assert "unseen_auroc" not in scores
    confidences, rights, entropies = [], [], {True: [], False: []}
    for e in range(EPISODES):
        for c in range(WAY):
            for row in known[e, c].double():
                p = row.exp().numpy()
                confidences.append(p.max())
                rights.append(p.argmax() == c)
                entropies[p.argmax() == c].append(-sum(x * np.log(x) for x in p))
    # Expected calibration error over 15 equal bins (lower, upper], by its definition
    confidences, rights, ece = np.array(confidences), np.array(rights), 0.0
    for i in range(15):
        inside = (confidences > i / 15) & (confidences <= (i + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(confidences[inside].mean() - rights[inside].mean())
    assert expected_calibration_error(scores["calibration"].sum(0)) == pytest.approx(ece)
    for (count, total), of_answer in zip(scores["entropy"].sum(0), (True, False), strict=True):
        assert count == len(entropies[of_answer])
        assert total == pytest.approx(sum(entropies[of_answer]))


@pytest.mark.parametrize(("query", "keep"), [(6, 19), (3, 10)])  # 80 % of 24 and of 12
def test_the_least_sure_fifth_is_rejected(query, keep):
    known = answers()[0][:, :, :query]
    kept = score(known)["accuracy_at_80"]
    for e in range(EPISODES):
        queries = [(float(row.max()), int(row.argmax()) == c) for c in range(WAY) for row in known[e, c]]
        surest = sorted(queries, reverse=True)[:keep]
        assert kept[e] == pytest.approx(np.mean([right for _, right in surest]))


def test_equally_sure_queries_count_alike():
    """All as sure as each other: rejecting some changes nothing, whatever their order."""
    known, unseen = torch.zeros(1, 4, 5, 4).log_softmax(-1), torch.zeros(1, 5, 4).log_softmax(-1)
    scores = score(known, unseen)
    assert scores["accuracy"][0] == scores["accuracy_at_80"][0] == 0.25  # the first class is the answer
    assert scores["unseen_auroc"][0] == 0.5
    assert scores["unseen_fpr95"][0] == 1


def test_unfamiliarity_is_scored_beside_the_top_probability():
    rng = np.random.default_rng(0)
    known, unseen = rng.random((2, 40)), 0.3 + 0.7 * rng.random((2, 30))
    log_p, log_unseen = torch.zeros(2, 4, 10, 4).log_softmax(-1), torch.zeros(2, 30, 4).log_softmax(-1)
    scores = score(log_p, log_unseen, unfamiliarity=(torch.tensor(known), torch.tensor(unseen)))
    for e in range(2):
        both = np.concatenate([known[e], unseen[e]])
        assert scores["unfamiliar_auroc"][e] == pytest.approx(
            roc_auc_score(np.repeat([0, 1], [40, 30]), both)
        )
        passing = np.sort(known[e])[37]  # 38 of 40 known ones pass
        assert scores["unfamiliar_fpr95"][e] == pytest.approx((unseen[e] <= passing).mean())
        assert scores["refused"][e] == pytest.approx((known[e] > 0.95).mean())


def test_certain_answers_have_finite_figures():
    """Probabilities of exactly 0 and 1, as a saturated softmax gives them."""
    certain = torch.log(torch.eye(3)[:, None].expand(3, 2, 3))[None]  # log 0 is -inf
    scores = score(certain, certain[:, 0])
    assert scores["nll"][0] == scores["brier"][0] == scores["entropy"].sum(0)[0, 1] == 0.0
    assert scores["accuracy"][0] == scores["accuracy_at_80"][0] == 1.0
    assert scores["entropy"][0, 1].tolist() == [0.0, 0.0]
    assert scores["calibration"][0, -1].tolist() == [6.0, 6.0, 6.0]


def test_interval_is_the_one_of_the_field():
    values = np.array([0.2, 0.4, 0.9])
    assert mean_interval(values) == (pytest.approx(0.5), pytest.approx(1.96 * values.std() / 3**0.5))


def test_queries_of_any_classes_are_scored_by_their_truth():
    known, _ = answers()
    order = torch.randperm(WAY * QUERY, generator=torch.Generator().manual_seed(1))
    truth = torch.arange(WAY)[:, None].expand(EPISODES, WAY, QUERY)
    shuffled = known.flatten(1, 2)[:, order].view_as(known)
    moved = truth.flatten(1)[:, order].view_as(truth)
    for name, values in score(shuffled, truth=moved).items():
        np.testing.assert_allclose(values, score(known)[name], err_msg=name)
