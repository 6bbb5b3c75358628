"""The calibrated DPKL: its support statistics, its folds, its weights and its sense of the unfamiliar."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm

from fewshot_dpkl import (
    DPKL,
    CalibratedDPKLHead,
    DPKLHead,
    EpisodeSampler,
    FeatureSet,
    evaluate,
    load_head,
    make_head,
)
from fewshot_dpkl.heads import calibrated
from fewshot_dpkl.heads.base import unit
from fewshot_dpkl.heads.familiar import (
    DEVIATION,
    TYPICAL,
    believed_distances,
    known_distances,
    of_class_means,
    share_more_familiar,
)
from fewshot_dpkl.heads.folds import draw_folds, each_fold, weigh
from fewshot_dpkl.heads.means import COMMON_DIMENSIONS, COMMON_WEIGHT, class_means, geometry
from tests.heads.test_heads import QUICK, quick, task

UNEVEN = torch.tensor([[0, 1, 1, 2, 2, 2, 3, 4, 4]])
NAME = "dpkl-calibrated"


def points(labels, dimension=12, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shape = (*labels.shape, dimension)
    return unit(torch.rand(shape, generator=rng, dtype=torch.float64) + labels[..., None] / 4)


def test_geometry_is_that_of_all_choices_of_one_example_per_class():
    x = points(UNEVEN)
    found = geometry(x, UNEVEN, class_means(x, UNEVEN))
    rows, y = x[0].numpy(), UNEVEN[0].numpy()
    members = [rows[y == c] for c in range(5)]
    cosine = np.mean([(members[c] @ members[d].T).mean() for c, d in permutations(range(5), 2)])
    traces = [np.square(np.cov(np.array(chosen).T)).sum() for chosen in product(*members)]
    trace = (4**2 * np.mean(traces) - 4 * (1 - cosine) ** 2) / (3 * 6)
    seen = 9 / np.mean([1 / len(of_class) for of_class in members])
    inverse = (seen * trace / (1 - cosine) ** 2 + COMMON_WEIGHT / COMMON_DIMENSIONS) / (seen + COMMON_WEIGHT)
    assert float(found.cosine) == pytest.approx(cosine)
    assert float(found.dimensions) == pytest.approx(1 / inverse)


def test_dimensions_are_found_whatever_the_features_have_in_common():
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(40)[None]
    for number in (20, 80):
        spread = torch.randn(1, 40, number, generator=rng, dtype=torch.float64)
        x = unit(torch.cat([spread / number**0.5, torch.ones(1, 40, 1)], -1))
        found = geometry(x, labels, class_means(x, labels))
        assert float(found.cosine) == pytest.approx(0.5, abs=0.03)
        assert float(found.dimensions) == pytest.approx(number, rel=0.1)


def test_geometry_of_two_classes_is_what_is_believed():
    labels = torch.tensor([[0, 1, 1]])
    x = points(labels)
    assert float(geometry(x, labels, class_means(x, labels)).dimensions) == COMMON_DIMENSIONS


def test_distances_left_out_are_those_to_means_without_the_point():
    x = points(UNEVEN)
    classes = class_means(x, UNEVEN)
    found, counted = classes.squared_distances_left_out(x, UNEVEN)
    rows, y = x[0].numpy(), UNEVEN[0].numpy()
    variance = sum(((rows[y == c] - rows[y == c].mean(0)) ** 2).sum() for c in range(5)) / (9 - 5)
    inverse = np.mean([1 / (y == c).sum() for c in range(5)])
    for i in range(9):
        for c in range(5):
            others = [j for j in range(9) if y[j] == c and j != i]
            if not others:
                assert not counted[0, i]
                continue
            squared = ((rows[i] - rows[others].mean(0)) ** 2).sum()
            expected = squared + variance * (inverse - 1 / len(others))
            assert float(found[0, i, c]) == pytest.approx(expected)


def test_every_fold_knows_every_class_and_holds_every_example_out_once():
    labels = torch.tensor([[0] * 7 + [1] + [2] * 2 + [3] * 3, [0] * 4 + [1] * 4 + [2] * 4 + [3]])
    folds = draw_folds(labels, [3, 4], 3)
    assert ((folds == -1) == torch.tensor([[c == 1 for c in labels[0]], [c == 3 for c in labels[1]]])).all()
    times = torch.zeros_like(labels)
    for episodes, kept, out in each_fold(folds, at_once=2):
        assert len(episodes) <= 2
        for e, inside, outside in zip(episodes, kept, out, strict=True):
            assert set(labels[e, inside].tolist()) == {0, 1, 2, 3}
            assert sorted([*inside.tolist(), *outside.tolist()]) == list(range(13))
            times[e, outside] += 1
    assert torch.equal(times, (folds >= 0).long())
    assert not list(each_fold(draw_folds(torch.tensor([[0, 1, 2]]), [0], 3), 8))


def test_weights_have_the_highest_posterior():
    rng = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (3, 11), generator=rng)
    labels[:, :4] = torch.arange(4)
    scores = torch.randn(3, 2, 11, 4, generator=rng, dtype=torch.float64)
    scores += 2 * torch.nn.functional.one_hot(labels, 4)[:, None]
    held = torch.rand(3, 11, generator=rng) < 0.8
    held[2] = False
    centre = torch.randn(3, 2, generator=rng, dtype=torch.float64)
    found = weigh(scores, labels, held, centre, 0.4).log().numpy()
    for e in range(3):

        def loss(u, e=e):
            logits = (np.exp(u)[:, None, None] * scores[e].numpy()).sum(0)
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            own = log_p[np.arange(11), labels[e]]
            far = np.square(u - centre[e].numpy()).sum() / 0.4**2
            return far / 2 - own[held[e].numpy()].sum()

        np.testing.assert_allclose(found[e], minimize(loss, centre[e].numpy(), tol=1e-10).x, atol=1e-4)
    np.testing.assert_allclose(found[2], centre[2], atol=1e-12)


def test_the_answer_is_the_mean_over_particles_of_both_parts():
    x, y, queries, _ = task()
    head = quick(NAME).fit(x, y)
    alone = quick("dpkl", kernel="exact").fit(x, y)
    q = unit(torch.tensor(queries, dtype=torch.float64))
    own = q @ head.state_["linear"][0].double().T + head.state_["intercepts"][0].double()
    log_rho = np.log(alone.predict_proba_particles(queries))  # q P C
    logits = float(head.state_["temperature"]) * log_rho + own[:, None].numpy()
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(head.predict_proba(queries), p.mean(1), atol=1e-5)
    np.testing.assert_allclose(head.predict_proba_particles(queries).mean(1), p.mean(1), atol=1e-5)


def test_one_example_of_every_class_leaves_the_prior_to_decide():
    x, y, *_ = task(shot=1, way=6)
    head = quick(NAME).fit(x, y)
    rows = unit(torch.tensor(x, dtype=torch.float64))[None]
    labels = torch.arange(6)[None]
    seen = geometry(rows, labels, class_means(rows, labels))
    expected = calibrated.LEARNT * float(seen.cosine * (seen.dimensions / COMMON_DIMENSIONS) ** (1 / 3))
    assert float(head.state_["temperature"]) == pytest.approx(expected, rel=1e-4)


def test_uneven_classes_are_an_ordinary_case():
    x, y, queries, truth = task(shot=6, way=4)
    kept = np.r_[0:6, 6:7, 12:14, 18:24]
    head = quick(NAME).fit(x[kept], y[kept])
    assert (head.predict(queries) == truth).mean() > 0.9
    shuffled = np.random.default_rng(0).permutation(len(queries))
    np.testing.assert_allclose(
        head.predict_proba(queries[shuffled]), head.predict_proba(queries)[shuffled], atol=1e-12
    )


def test_another_order_of_examples_and_classes_changes_no_more_than_another_seed():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(5, 12))
    x, queries = (centres.repeat(n, 0) + rng.normal(size=(5 * n, 12)) for n in (4, 10))
    y = np.arange(5).repeat(4)
    shuffled = [rng.permutation(len(y)) for _ in range(8)]
    of_orders = np.stack([quick(NAME).fit(x[rows], y[rows]).predict_proba(queries) for rows in shuffled])
    of_seeds = np.stack([quick(NAME, random_state=s).fit(x, y).predict_proba(queries) for s in range(8)])
    assert of_orders.std(0).mean() < 1.5 * of_seeds.std(0).mean()
    assert abs(of_orders.mean(0) - of_seeds.mean(0)).mean() < of_seeds.std(0).mean()


def test_held_out_examples_raise_and_lower_the_temperature():
    x, given, *_ = task(shot=6)
    ratios = []
    for y in (given, np.random.default_rng(0).permutation(given)):
        rows, labels = unit(torch.tensor(x, dtype=torch.float64))[None], torch.tensor(y)[None]
        seen = geometry(rows, labels, class_means(rows, labels))
        head = quick(NAME)
        found = head._weights(torch.tensor(x)[None], labels, [0], seen).sum()
        ratios.append(float(found / (seen.dimensions / COMMON_DIMENSIONS) ** (1 / 3)))
    assert ratios[0] > 1 > ratios[1]


def test_known_distances_are_a_posterior_predictive():
    distances, counted = (
        torch.tensor([[0.5, 0.7, 9.0]], dtype=torch.float64),
        torch.tensor([[True, True, False]]),
    )
    believed = torch.tensor([[1.5, 0.2]], dtype=torch.float64)
    mean, deviation = known_distances(distances, counted, believed)[0].tolist()
    assert mean == pytest.approx((1.5 + 0.5 + 0.7) / 3)
    variance = (5 * 0.2**2 + (0.5 - mean) ** 2 + (0.7 - mean) ** 2) / 7
    assert deviation == pytest.approx((variance * 4 / 3) ** 0.5)
    shares = share_more_familiar(
        torch.tensor([[0.4, 1.9]], dtype=torch.float64), torch.tensor([[mean, deviation]])
    )
    np.testing.assert_allclose(shares[0], norm.cdf([0.4, 1.9], mean, deviation), rtol=1e-6)


def test_before_an_example_is_seen_the_nearest_class_is_its_own_or_another():
    rng = np.random.default_rng(0)
    others = torch.tensor(rng.normal(0.8, 0.2, (1, 400)))
    mean, deviation = believed_distances(torch.tensor([1.25], dtype=torch.float64), others)[0].tolist()
    draws = (
        rng.normal(1.25 * TYPICAL, 1.25 * DEVIATION, 10**6),
        rng.normal(others.mean(), others.std(), 10**6),
    )
    nearest = np.minimum(*draws)
    assert (mean, deviation) == pytest.approx((nearest.mean(), nearest.std()), abs=3e-3)


@pytest.mark.parametrize("way", [5, 20])
def test_one_example_of_each_of_many_classes_refuses_as_few_as_of_five(way):
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(40, 30)) + 1).repeat(20, 0) + 1.4 * rng.normal(size=(800, 30))
    features = FeatureSet.from_arrays(X, np.arange(40).repeat(20))
    sampler = EpisodeSampler(features, way=way, shot=1)
    refused = evaluate({"nn": make_head("nn")}, features, sampler, 60, unseen=True)["nn"].refused
    assert 0.02 < refused.mean() < 0.1


@pytest.mark.parametrize("name", ["nn", NAME])
def test_known_queries_are_refused_as_often_as_asked_and_strange_ones_more(name):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, 40)) + 1
    X = centres.repeat(40, 0) + 0.8 * rng.normal(size=(1200, 40))
    features = FeatureSet.from_arrays(X, np.arange(30).repeat(40))
    drawn = EpisodeSampler(features, shot=5, query=16).draw(range(40), unseen=True)
    table = torch.tensor(X, dtype=torch.float32)
    support, queries, strange = (
        table[rows.reshape(40, -1)] for rows in (drawn.support, drawn.query, drawn.unseen)
    )
    labels = torch.arange(5).repeat_interleave(5).expand(40, -1)
    head = quick(name)
    state = head.fit_episodes(support, labels, drawn.seeds.tolist())
    known, unseen = (head.unfamiliarity_episodes(state, x) for x in (queries, strange))
    assert float(known.min()) >= 0
    assert float(unseen.max()) <= 1
    for share in (0.05, 0.2):
        assert float((known > 1 - share).float().mean()) == pytest.approx(share, abs=0.5 * share)
    assert float((unseen > 0.95).float().mean()) > 0.3


def test_unfamiliarity_is_the_share_of_left_out_support_points():
    x, y, queries, _ = task()
    rows, labels = unit(torch.tensor(x)[None]), torch.tensor(y)[None]
    classes = class_means(rows, labels)
    known = of_class_means(rows, labels, classes, geometry(rows, labels, classes))[0]
    nearest = torch.cdist(unit(torch.tensor(queries)), classes.means[0]).amin(-1)
    expected = norm.cdf(nearest.numpy(), *known.tolist())
    np.testing.assert_allclose(quick(NAME).fit(x, y).unfamiliarity(queries), expected, atol=1e-4)


def test_heads_without_an_unfamiliarity_say_so():
    x, y, *_ = task()
    head = quick("logreg").fit(x, y)
    assert not head.can_tell_unfamiliar
    with pytest.raises(NotImplementedError, match="logreg cannot say how unfamiliar an example is; use dpkl"):
        head.unfamiliarity(x)


def test_a_saved_head_knows_the_unfamiliar(tmp_path):
    x, y, queries, _ = task()
    for name in ("nn", NAME):
        head = quick(name).fit(x, y)
        head.save(tmp_path / "head.safetensors")
        assert np.array_equal(
            load_head(tmp_path / "head.safetensors").unfamiliarity(queries), head.unfamiliarity(queries)
        )


def test_presets():
    assert type(DPKL()) is DPKLHead
    assert isinstance(DPKL(preset="calibrated"), CalibratedDPKLHead)
    assert DPKL(preset="calibrated").kernel == "exact"
    assert make_head(NAME, **QUICK[NAME]).folds == 3
    with pytest.raises(ValueError, match="there is no preset 'best'; choose from paper, calibrated"):
        DPKL(preset="best")
