import numpy as np
import pytest

from fewshot_dpkl import EpisodeSampler
from tests.conftest import cluster_features


def test_episodes_depend_on_seed_and_number_alone(clusters):
    sampler = EpisodeSampler(clusters, seed=3)
    whole = sampler.draw(range(20))
    for size in (1, 7, 20):
        parts = list(sampler.batches(range(20), size))
        for name in ("classes", "support", "query", "seeds"):
            assert np.array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))
    assert np.array_equal(sampler.draw(np.array([13, 2])).support, whole.support[[13, 2]])
    assert not np.array_equal(EpisodeSampler(clusters, seed=4).draw(range(20)).support, whole.support)


EXPECTED = {
    "classes": [[2, 1, 0], [6, 3, 4]],
    "support": [[[62], [50], [23]], [[181], [92], [130]]],
    "query": [[[71, 64], [44, 39], [0, 19]], [[206, 189], [111, 117], [122, 137]]],
    "unseen": [[179, 156], [236, 227]],
}


def test_episodes_are_the_same_on_every_machine():
    """Figures of these episodes are published: their stream must not change."""
    sampler = EpisodeSampler(cluster_features(), way=3, shot=1, query=2, seed=0)
    assert sampler.draw(range(2)).unseen.shape == (2, 0)
    episode = sampler.draw(range(2), unseen=True)
    assert episode.classes.tolist() == EXPECTED["classes"]
    assert episode.support.tolist() == EXPECTED["support"]
    assert episode.query.tolist() == EXPECTED["query"]
    assert episode.unseen.tolist() == EXPECTED["unseen"]


def test_support_and_query_are_disjoint_and_of_the_right_class(clusters):
    episodes = EpisodeSampler(clusters, way=5, shot=5, query=16).draw(range(50))
    assert episodes.support.shape == (50, 5, 5)
    assert episodes.query.shape == (50, 5, 16)
    for classes, support, query in zip(episodes.classes, episodes.support, episodes.query, strict=True):
        assert len(set(classes)) == 5
        rows = np.concatenate([support, query], 1)
        assert len(np.unique(rows)) == rows.size
        assert (clusters.labels[rows] == classes[:, None]).all()


def test_every_class_and_row_is_drawn_about_equally_often(clusters):
    episodes = EpisodeSampler(clusters, way=5, shot=5, query=16).draw(range(800))
    counts = np.bincount(episodes.classes.ravel(), minlength=8)
    assert abs(counts / 800 - 5 / 8).max() < 0.06
    rows = np.bincount(episodes.support.ravel(), minlength=len(clusters)) / 800
    assert abs(rows - 5 / 8 * 5 / 30).max() < 0.05


def test_unseen_queries_are_of_one_class_outside_the_episode(clusters):
    sampler = EpisodeSampler(clusters, way=5, shot=5, query=16)
    episodes = sampler.draw(range(400), unseen=True)
    assert episodes.unseen.shape == (400, 16)
    labels = clusters.labels[episodes.unseen]
    assert (labels == labels[:, :1]).all()
    assert not (labels[:, :1] == episodes.classes).any()
    assert all(len(set(rows)) == 16 for rows in episodes.unseen)
    assert abs(np.bincount(labels[:, 0], minlength=8) / 400 - 1 / 8).max() < 0.06
    assert np.array_equal(sampler.draw(np.array([13, 2]), unseen=True).unseen, episodes.unseen[[13, 2]])


def test_unseen_queries_need_a_class_that_is_left(clusters):
    with pytest.raises(
        ValueError, match="8-way task leaves no class unseen, of 8 in the features; lower way"
    ):
        EpisodeSampler(clusters, way=8).draw(range(1), unseen=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"query": 26},
            "class 'class 0' has 30 examples, but an episode takes 31 of each class .5 shots . 26 queries",
        ),
        ({"way": 9}, "a 9-way task needs 9 classes, but the features hold 8"),
        ({"way": 1}, "way is 1; it must be at least 2"),
        ({"shot": 0}, "shot is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_episodes_are_refused(clusters, settings, words):
    with pytest.raises(ValueError, match=words):
        EpisodeSampler(clusters, **settings)


def test_unlabelled_examples_leave_the_episodes_as_they_are(clusters):
    plain = EpisodeSampler(clusters, way=3, shot=2, query=5).draw(range(30))
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=5, unlabeled=4, distractors=2)
    episodes = sampler.draw(range(30))
    for name in ("classes", "support", "query", "seeds", "query_classes"):
        assert np.array_equal(getattr(episodes, name), getattr(plain, name))
    assert plain.unlabeled.shape == (30, 0)
    for i in range(30):
        rows, classes = episodes.unlabeled[i], episodes.classes[i]
        assert len(np.unique(rows)) == 5 * 4
        assert not np.isin(
            rows, np.concatenate([episodes.support[i].ravel(), episodes.query[i].ravel()])
        ).any()
        labels = clusters.labels[rows]
        assert (labels[:12] == np.repeat(classes, 4)).all()
        assert not np.isin(labels[12:], classes).any()
        assert len(np.unique(labels[12:])) == 2
    both = EpisodeSampler(clusters, way=3, shot=2, query=5, transductive=True, unlabeled=4).draw(range(30))
    assert np.array_equal(both.unlabeled[:, :15], plain.query.reshape(30, -1))
    assert np.array_equal(both.unlabeled[:, 15:], episodes.unlabeled[:, :12])


def test_uneven_queries_follow_a_dirichlet_distribution():
    features = cluster_features(per_class=90)
    even = EpisodeSampler(features, way=4, shot=2, query=20).draw(range(500))
    sampler = EpisodeSampler(features, way=4, shot=2, query=20, concentration=2.0)
    episodes = sampler.draw(range(500))
    assert np.array_equal(episodes.support, even.support)
    counts = np.stack([np.bincount(c.ravel(), minlength=4) for c in episodes.query_classes])
    assert (counts.sum(1) == 80).all()
    # Of a Dirichlet-multinomial: mean n/C, variance n p (1 - p) (n + a) / (1 + a), a = 8, capped at 88 here
    assert counts.mean() == 20
    assert abs(counts.var() / (80 * 3 / 16 * 88 / 9) - 1) < 0.1
    for i in range(500):
        rows = episodes.query[i].ravel()
        assert len(np.unique(np.concatenate([rows, episodes.support[i].ravel()]))) == 88
        assert (features.labels[rows] == episodes.classes[i][episodes.query_classes[i].ravel()]).all()
    part = sampler.draw(np.array([7, 3]))
    assert np.array_equal(part.query, episodes.query[[7, 3]])


def test_no_class_is_asked_for_more_than_it_has(clusters):
    sampler = EpisodeSampler(clusters, way=3, shot=5, query=20, unlabeled=5, concentration=0.2)
    episodes = sampler.draw(range(50))
    counts = [np.bincount(c.ravel(), minlength=3) for c in episodes.query_classes]
    assert np.max(counts) == 20  # of 30: 5 shots and 5 unlabelled are taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distractors": 2}, "say by unlabeled how many"),
        ({"unlabeled": 10}, "takes 31 of each class \\(5 shots \\+ 16 queries \\+ 10 unlabelled\\)"),
        (
            {"unlabeled": 2, "distractors": 4},
            "needs 9 classes, but the features hold 8; lower way or distractors",
        ),
        ({"concentration": 0.0}, "must be positive"),
        ({"unlabeled": -1}, "unlabeled is -1"),
    ],
)
def test_impossible_unlabelled_examples_are_refused(clusters, options, message):
    with pytest.raises(ValueError, match=message):
        EpisodeSampler(clusters, **options)
