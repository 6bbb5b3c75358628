"""Heads that learn from unlabelled examples."""

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from fewshot_dpkl import HEADS, load_head
from fewshot_dpkl.heads import unlabelled
from fewshot_dpkl.heads.base import unit
from fewshot_dpkl.heads.distractors import two_groups, weights_of_unlabeled
from fewshot_dpkl.heads.training import variance
from fewshot_dpkl.heads.training.layers import FreeLayers
from fewshot_dpkl.heads.training.particle import Mixing, embed
from fewshot_dpkl.heads.training.similarity import ExactKernel
from fewshot_dpkl.heads.unlabelled import assign, evenness, matching_temperature, support_space
from tests.heads.test_heads import quick, task

LEARN = sorted(name for name, head in HEADS.items() if head.learns_from_unlabeled)
MIXTURES = [name for name in LEARN if name not in ("dpkl", "dblr")]


def semi_task(seed=0, way=4, shot=1, each=20, spread=1.2, dimension=30):
    """A hard task of few labels and many unlabelled examples: X, y, unlabelled, queries and their labels."""
    rng = np.random.default_rng(seed)
    centres = rng.exponential(size=(way, dimension))

    def draw(labels):
        return np.abs(centres[labels] + spread * rng.normal(size=(len(labels), dimension))).astype(np.float32)

    y, rest = np.repeat(np.arange(way), shot), np.repeat(np.arange(way), each)
    return draw(y), y, draw(rest), draw(rest), rest


@pytest.mark.parametrize("name", LEARN)
def test_without_unlabelled_examples_nothing_changes(name):
    x, y, _, xq, _ = semi_task(shot=3)
    plain = quick(name).fit(x, y)
    none = quick(name).fit(x, y, unlabeled=x[:0])
    assert set(plain.state_) == set(none.state_)
    assert all(torch.equal(plain.state_[key], none.state_[key]) for key in plain.state_)
    assert np.array_equal(plain.predict_proba(xq), none.predict_proba(xq))


@pytest.mark.parametrize("name", MIXTURES)
def test_unlabelled_examples_help(name):
    gains = []
    for seed in range(8):
        x, y, unlabeled, xq, yq = semi_task(seed)
        with_them = quick(name).fit(x, y, unlabeled=unlabeled)
        gains.append(with_them.score(xq, yq) - quick(name).fit(x, y).score(xq, yq))
    assert np.mean(gains) > 0.05


@pytest.mark.parametrize("name", LEARN)
def test_batch_of_episodes_equals_single_episodes(name):
    tasks = [semi_task(seed, shot=3, each=6) for seed in range(3)]
    support, labels, unlabeled, query = (torch.tensor(np.stack([t[i] for t in tasks])) for i in (0, 1, 2, 3))
    head = quick(name)
    state = head.fit_episodes(support, labels, [11, 12, 13], unlabeled=unlabeled)
    together = head.log_proba_episodes(state, query).exp()
    by_particle = head.particle_log_proba_episodes(state, query).exp()
    torch.testing.assert_close(by_particle.mean(2), together, atol=1e-5, rtol=0)
    for i, (x, y, u, xq, _) in enumerate(tasks):
        single = quick(name, random_state=11 + i) if "random_state" in head.get_params() else quick(name)
        np.testing.assert_allclose(single.fit(x, y, u).predict_proba(xq), together[i], atol=5e-4)


@pytest.mark.parametrize("name", LEARN)
def test_queries_are_answered_one_by_one(name, tmp_path):
    x, y, unlabeled, xq, _ = semi_task(shot=2)
    head = quick(name).fit(x, y, unlabeled)
    alone = np.concatenate([head.predict_proba(row[None]) for row in xq[:5]])
    np.testing.assert_allclose(alone, head.predict_proba(xq)[:5], rtol=1e-10)
    head.save(tmp_path / "head.safetensors")
    assert np.array_equal(load_head(tmp_path / "head.safetensors").predict_proba(xq), head.predict_proba(xq))
    if name not in MIXTURES:  # which look at minibatches
        return
    order = np.random.default_rng(0).permutation(len(unlabeled))
    shuffled = quick(name).fit(x, y, unlabeled[order])
    np.testing.assert_allclose(shuffled.predict_proba(xq), head.predict_proba(xq), atol=5e-4)


def test_other_heads_refuse_unlabelled_examples_in_a_sentence():
    x, y, unlabeled, _, _ = semi_task()
    with pytest.raises(ValueError, match="head nn cannot learn from unlabelled examples; fit it without"):
        quick("nn").fit(x, y, unlabeled)
    with pytest.raises(ValueError, match="features"):
        quick("centroid").fit(x, y, unlabeled[:, :4])


def test_cosines_are_those_of_whitened_points():
    """The metric of the support set's scatter, against the inverse of the matrix itself."""
    x, y, xq, _ = task(way=3, shot=4, dimension=7)
    support, query = torch.tensor(x)[None].double(), torch.tensor(xq)[None].double()
    members = torch.nn.functional.one_hot(torch.tensor(y))[None].double()
    centre = support.mean(1, keepdim=True) / 10
    space = support_space(support, members, torch.cat([support, query], 1), centre)

    def centred(points):
        points = points / points.norm(dim=-1, keepdim=True) - centre
        return points / points.norm(dim=-1, keepdim=True)

    z, everything = centred(support)[0], centred(torch.cat([support, query], 1))[0]
    within = sum((z[y == c] - z[y == c].mean(0)).T @ (z[y == c] - z[y == c].mean(0)) for c in range(3))
    variance = 1 - everything.mean(0).square().sum()
    metric = torch.linalg.inv(torch.eye(7).double() + 30 / (12 - 3) / variance * within)
    placed, asked = space.place(query)[0], centred(query)[0]
    lengths = torch.einsum("id,de,ie->i", asked, metric, asked).sqrt()
    torch.testing.assert_close(
        space.dual(placed[None])[0] @ placed.T, (asked @ metric @ asked.T) / lengths[:, None] / lengths
    )


def test_even_and_uneven_counts_are_told_apart():
    even = evenness(torch.tensor([[16.0] * 5, [14, 18, 15, 17, 16], [40, 20, 10, 6, 4]]))
    assert even[0] > even[1] > 0.9
    assert even[2] < 0.05


def mixture(spread, strange=0, shot=5):
    """Support set, classes, unlabelled points (`strange` distractors last) and what logreg says of them."""
    x, y, unlabeled, _, truth = semi_task(shot=shot, spread=spread)
    rng = np.random.default_rng(1)
    noise = np.abs(rng.exponential(size=30) + spread * rng.normal(size=(strange, 30))).astype(np.float32)
    points = np.concatenate([unlabeled, noise])
    log_p = quick("logreg").fit(x, y).predict_log_proba(points)
    arrays = (x, y, points, log_p.astype(np.float32))
    return (*(torch.tensor(array)[None] for array in arrays), truth)


def test_distractors_weigh_less_than_examples_of_the_classes():
    support, labels, points, log_p, truth = mixture(0.5, strange=80)
    weights = weights_of_unlabeled(support, labels, points)
    assert weights[0, 80:].mean() < 0.3 * weights[0, :80].mean()
    assert weights_of_unlabeled(support, labels, points[:, :80]).min() > 0.9
    members, count = torch.nn.functional.one_hot(labels).float(), torch.tensor([8.0])
    fit = assign(support, members, points, log_p, weights, torch.zeros(1, 1, 30), count)
    assert (fit.responsibilities[0, :80].argmax(-1).numpy() == truth).mean() > 0.9


def test_points_that_weigh_nothing_are_as_good_as_not_there():
    support, labels, points, log_p, _ = mixture(0.5, strange=40, shot=1)
    members, count, centre = torch.nn.functional.one_hot(labels).float(), torch.tensor([8.0]), torch.zeros(30)
    weights = torch.cat([torch.ones(1, 80), torch.zeros(1, 40)], 1)
    both = assign(support, members, points, log_p, weights, centre[None, None], count)
    alone = assign(
        support, members, points[:, :80], log_p[:, :80], weights[:, :80], centre[None, None], count
    )
    placed = both.space.place(points)[0]
    found = [torch.nn.functional.normalize(fit.directions[0], dim=-1) for fit in (both, alone)]
    assert (found[0] * found[1]).sum(-1).min() > 0.999  # only the variance of all points knows of them
    torch.testing.assert_close(both.left_out[0, 80:], placed[80:] @ both.directions[0].T)


def test_distances_of_two_groups_are_told_apart():
    """Against scikit-learn's mixture with one common variance."""
    rng = np.random.default_rng(0)
    d = np.concatenate([rng.normal(1, 0.1, 300), rng.normal(1.5, 0.1, 100)])
    start = torch.tensor([[0.9], [1.5], [0.01], [0.0]])
    chance, share = two_groups(torch.tensor(d[None], dtype=torch.float32), *start)
    expected = GaussianMixture(2, covariance_type="tied", means_init=[[1.0], [1.5]]).fit(d[:, None])
    nearer = expected.predict_proba(d[:, None])[:, 0]
    np.testing.assert_allclose(chance[0], nearer, atol=0.12)
    assert float(share) == pytest.approx(0.25, abs=0.02)


def test_left_out_points_have_no_part_in_their_class():
    """A point's similarity to a class mean of all others, in the given weights, by a loop over points."""
    support, labels, points, log_p, _ = mixture(0.8)
    support, points, log_p = support.double(), points.double(), log_p.double()
    members, centre = torch.nn.functional.one_hot(labels).double(), 0.5 * support.mean(1, keepdim=True) / 9
    weights, count = torch.linspace(0.2, 1, 80).double()[None], torch.tensor([8.0]).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unlabelled, "ROUNDS", 1)
        fit = assign(support, members, points, log_p, weights, centre, count)
    placed, known = fit.space.place(points)[0], members[0].T @ fit.space.place(support)[0]
    part = 3 * weights[0, :, None] * fit.responsibilities[0]
    part = part * (fit.responsibilities[0] * log_p[0].exp()).sum(-1, keepdim=True)
    whole = known + part.T @ placed
    length = (whole * fit.space.dual(whole[None])[0]).sum(-1).sqrt()
    sharpness = (fit.directions[0] * whole).sum(-1) / length
    for i in (0, 33, 79):
        rest = known + (part.T @ placed) - part[i][:, None] * placed[i]
        dual = fit.space.dual(rest[None])[0]
        expected = sharpness * (dual @ placed[i]) / (rest * dual).sum(-1).sqrt()
        torch.testing.assert_close(fit.left_out[0, i], expected)


def test_temperature_gives_the_confidence_that_is_wanted():
    draw = torch.Generator().manual_seed(0)
    logits, weights = 5 * torch.randn(2, 50, 1, 4, generator=draw), torch.rand(2, 50, generator=draw)
    wanted = torch.tensor([0.4, 0.9])
    tau = matching_temperature(logits, weights, wanted)
    found = (tau * logits).softmax(-1).mean(2).amax(-1)
    torch.testing.assert_close((weights * found).sum(1) / weights.sum(1), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", [2, 3, 8])
def test_more_right_answers_are_expected_of_easier_tasks(way):
    expected = []
    for spread in (0.3, 1.0, 3.0):
        x, y, points, _, _ = semi_task(way=way, spread=spread, dimension=200)
        answers = quick("centroid").fit(x, y, points).predict_proba(points)
        expected.append(answers.max(1).mean())
    assert expected[0] > expected[1] > expected[2]


def test_posterior_variance_is_that_of_the_mean_embeddings():
    """Against a loop over pairs of particles, and zero for a labelled point as the noise goes."""
    draw = torch.Generator().manual_seed(0)
    z = unit(torch.rand(7, 3, 5, generator=draw, dtype=torch.float64))

    def k(a, b):
        return np.mean([np.exp(-0.5 / 0.8**2 * float((p - q).square().sum())) for p in a for q in b])

    known = np.array([[k(a, b) for b in z[:4]] for a in z[:4]]) + variance.NOISE * np.eye(4)
    for i in range(4, 7):
        across = np.array([k(z[i], b) for b in z[:4]])
        expected = k(z[i], z[i]) - across @ np.linalg.solve(known, across)
        found = variance.posterior_variance(z[None, :4], z[None, 4:], 0.8)[0, i - 4]
        assert float(found) == pytest.approx(expected, rel=1e-10)
    assert float(variance.posterior_variance(z[None, :4], z[None, :1], 0.8)) < 2 * variance.NOISE


def test_semi_supervised_gradient_agrees_with_finite_differences():
    draw = torch.Generator().manual_seed(0)
    points = unit(torch.rand(1, 9, 6, generator=draw, dtype=torch.float64))
    weights = torch.randn(1, 6, 3, 5, generator=draw, dtype=torch.float64)
    layers = FreeLayers(points, weights, "sgd", 1.0, points[:, :4])
    looks = torch.arange(4, 9).expand(1, 1, -1)
    training = variance.SemiSupervisedTraining(
        layers=layers, labels=torch.tensor([[0, 0, 1, 1]]), theta=torch.randn(1, 2, 2, 5).double(),
        similarity=ExactKernel(1.0), orders=torch.zeros(1, 1, 4), alpha=0.7, looks=looks,
    )  # fmt: skip
    training.mixing = Mixing(torch.eye(3, dtype=torch.float64)[None], *torch.zeros(2, 1, 2, 2))
    rows, gradient = training.with_more(
        0, torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0, 3, 5, dtype=torch.float64)
    )
    layers.move(rows, gradient, None)
    moved = weights - layers.values  # a step of rate 1 is the gradient

    def loss(w):
        z = unit(torch.einsum("nk,kmd->nmd", points[0], w).relu())[None]
        return 0.7 * float(variance.posterior_variance(z[:, :4], z[:, 4:], 1.0).mean())

    for index in ((0, 0, 0), (3, 2, 4), (5, 1, 2)):
        step = torch.zeros_like(weights[0])
        step[index] = 1e-5
        numeric = (loss(weights[0] + step) - loss(weights[0] - step)) / 2e-5
        assert float(moved[0][index]) == pytest.approx(numeric, rel=1e-5, abs=1e-9)


def test_the_regulariser_lowers_the_variance_of_unlabelled_points():
    x, y, unlabeled, _, _ = semi_task(shot=3)
    spread = []
    for alpha in (0.0, 3.0):
        head = quick("dpkl", alpha=alpha).fit(x, y, unlabeled)
        z = [embed(unit(torch.tensor(points))[None], head.state_["weights"]) for points in (x, unlabeled)]
        spread.append(float(variance.posterior_variance(*z, 1.0).mean()))
    assert spread[1] < 0.8 * spread[0]
