"""Every head: batches, permutations, easy tasks, odd shapes, scikit-learn's own checks."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.estimator_checks import check_estimator

from fewshot_dpkl import HEADS, DPKLHead, LogisticRegressionHead, NearestNeighborHead, make_head
from fewshot_dpkl.heads.base import unit

QUICK = {
    "nn": {},
    "centroid": {},
    "cosine": {"epochs": 20, "learning_rate": 0.5},
    "logreg": {},
    "blr": {"epochs": 20, "learning_rate": 0.03},
    "bnn": {"epochs": 20, "latent": 24, "particles": 4, "learning_rate": 0.01},
    "dblr": {"epochs": 20, "latent": 24, "learning_rate": 0.01},
    "dpkl": {"epochs": 20, "latent": 24, "embeddings": 4, "particles": 4, "learning_rate": 0.01},
    "dpkl-calibrated": {"epochs": 20, "latent": 24, "embeddings": 4, "particles": 4, "learning_rate": 0.01},
}
ALL = sorted(HEADS)


def quick(name, **more):
    return make_head(name, **{**QUICK[name], **more})


def task(seed=0, way=4, shot=5, query=6, dimension=30, spread=0.3):
    """One easy task: X, y, queries and their labels."""
    rng = np.random.default_rng(seed)
    centres = rng.exponential(size=(way, dimension))
    y, yq = np.repeat(np.arange(way), shot), np.repeat(np.arange(way), query)

    def draw(labels):
        return np.abs(centres[labels] + spread * rng.normal(size=(len(labels), dimension))).astype(np.float32)

    return draw(y), y, draw(yq), yq


def test_every_head_has_quick_settings():
    assert set(QUICK) == set(HEADS)


@pytest.mark.parametrize("name", ALL)
def test_batch_of_episodes_equals_single_episodes(name):
    tasks = [task(seed) for seed in range(3)]
    support = torch.tensor(np.stack([t[0] for t in tasks]))
    labels = torch.tensor(np.stack([t[1] for t in tasks]))
    query = torch.tensor(np.stack([t[2] for t in tasks]))
    head = quick(name)
    together = head.log_proba_episodes(head.fit_episodes(support, labels, [11, 12, 13]), query).exp()
    for i, (x, y, xq, _) in enumerate(tasks):
        single = quick(name, random_state=11 + i) if "random_state" in head.get_params() else quick(name)
        np.testing.assert_allclose(single.fit(x, y).predict_proba(xq), together[i], atol=2e-5)


@pytest.mark.parametrize("name", ALL)
def test_renaming_classes_renames_predictions_and_nothing_else(name):
    x, y, xq, _ = task()
    names = np.array(["zebra", "ant", "mole", "bee"])
    plain, renamed = quick(name).fit(x, y), quick(name).fit(x, names[y])
    columns = [list(renamed.classes_).index(n) for n in names]
    np.testing.assert_allclose(plain.predict_proba(xq), renamed.predict_proba(xq)[:, columns], rtol=1e-12)
    assert np.array_equal(names[plain.predict(xq)], renamed.predict(xq))


@pytest.mark.parametrize("name", ALL)
def test_well_separated_clusters_are_solved(name):
    x, y, xq, yq = task(spread=0.15)
    assert quick(name).fit(x, y).score(xq, yq) == 1.0


@pytest.mark.parametrize("name", ALL)
def test_uneven_shots_any_labels_numpy_or_torch(name):
    x, y, xq, _ = task(way=3, shot=6)
    keep = np.array([0, 6, 7, 8, 12, 13, 14, 15, 16])  # 1, 3 and 5 shots
    labels = np.array(["robin", "wren", "owl"])[y[keep]]
    a = quick(name).fit(x[keep], labels)
    b = quick(name).fit(torch.tensor(x[keep]), labels)
    assert np.array_equal(a.predict_proba(xq), b.predict_proba(torch.tensor(xq)))
    assert set(a.predict(xq)) <= set(labels)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31 - 1),
    way=st.integers(2, 6),
    shot=st.integers(1, 4),
    dimension=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
)
def test_probabilities_are_positive_finite_and_sum_to_one(name, seed, way, shot, dimension, scale):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(way), shot)
    x = (scale * rng.normal(size=(len(y), dimension))).astype(np.float32)
    p = quick(name).fit(x, y).predict_proba((scale * rng.normal(size=(5, dimension))).astype(np.float32))
    assert p.shape == (5, way)
    assert np.isfinite(p).all()
    assert (p > 0).all()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_scikit_learn_conventions(name):
    cheap = {"epochs": 8} if "epochs" in QUICK[name] else {}
    check_estimator(quick(name, **cheap), expected_failed_checks={})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x, y: (np.where(x == x[0, 0], np.nan, x), y), "NaN"),
        (lambda x, y: (x, np.zeros_like(y)), "one class only"),
        (lambda x, y: (x[:, :, None], y), "dim 3"),
        (lambda x, y: (x, y[:-1]), "inconsistent numbers of samples"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(name, spoil, words):
    x, y, _, _ = task()
    with pytest.raises(ValueError, match=words):
        quick(name).fit(*spoil(x, y))


def test_unknown_heads_and_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"no head 'svm'; choose from nn, centroid"):
        make_head("svm")
    with pytest.raises(ValueError, match=r"'dpkl' has no parameter 'rate'; it takes particles"):
        make_head("dpkl", rate=1)
    x, y, _, _ = task()
    with pytest.raises(ValueError, match=r"unknown kernel 'rbf'; use 'rff' or 'exact'"):
        DPKLHead(kernel="rbf").fit(x, y)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown rotation 'haar'; use 'hadamard' or 'uniform'"):
        DPKLHead(rotation="haar").fit(x, y)  # type: ignore[arg-type]


def test_nearest_neighbour_agrees_with_scikit_learn(clusters):
    x, y = clusters.features[::3], clusters.labels[::3]
    query = clusters.features[1::3]
    theirs = KNeighborsClassifier(1, metric="cosine").fit(x, y).predict(query)
    assert np.array_equal(NearestNeighborHead().fit(x, y).predict(query), theirs)


@pytest.mark.parametrize("C", [0.1, 10.0, 1000.0])
@pytest.mark.parametrize("dimension", [5, 60])  # more points than dimensions, and fewer
def test_logistic_regression_agrees_with_scikit_learn(C, dimension):
    x, y, xq, _ = task(dimension=dimension, way=5)
    ours = LogisticRegressionHead(C=C).fit(x, y).predict_proba(xq)
    x, xq = (unit(torch.tensor(a, dtype=torch.float64)).numpy() for a in (x, xq))
    theirs = LogisticRegression(C=C, tol=1e-10, max_iter=100_000).fit(x, y).predict_proba(xq)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
