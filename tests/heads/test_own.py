"""Heads that are not ours: by path, by entry point, and scikit-learn's classifiers by the episode."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from fewshot_dpkl import HEADS, CentroidHead, EpisodeSampler, evaluate, load_head, make_head
from fewshot_dpkl.heads import find_heads


class Mine(CentroidHead):
    name = "mine"


def offer(monkeypatch, **heads):
    points = EntryPoints(EntryPoint(name, path, "fewshot_dpkl.heads") for name, path in heads.items())
    monkeypatch.setattr("fewshot_dpkl.heads.own.entry_points", points.select)


def test_a_classifier_of_scikit_learn_is_cloned_and_seeded_for_each_episode(clusters):
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=4, seed=1)
    forest = RandomForestClassifier(4)
    piped = make_pipeline(StandardScaler(), RandomForestClassifier(4))
    found = evaluate({"forest": forest, "piped": piped}, clusters, sampler, 5, batch_episodes=2)
    again = evaluate({"forest": forest, "piped": piped}, clusters, sampler, 5)
    drawn = sampler.draw(range(5))
    labels, truth = np.repeat(np.arange(3), 2), np.repeat(np.arange(3), 4)
    for e in range(5):
        x, q = (clusters.features[rows[e].ravel()] for rows in (drawn.support, drawn.query))
        by_hand = RandomForestClassifier(4, random_state=int(drawn.seeds[e]) % 2**32).fit(x, labels)
        assert found["forest"].accuracy[e] == pytest.approx(by_hand.score(q, truth))
    for name in found:
        assert np.array_equal(found[name].nll, again[name].nll)
    assert not hasattr(forest, "classes_"), "the given classifier is left as it was"


def test_what_gives_no_probabilities_is_refused(clusters):
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=4)
    with pytest.raises(ValueError, match=r"svm is neither a Head nor .* predict_proba; .*CalibratedClass"):
        evaluate({"svm": LinearSVC()}, clusters, sampler, 2)


def test_heads_are_found_by_path_and_by_entry_point(monkeypatch, tmp_path, clusters):
    assert isinstance(make_head("tests.heads.test_own:Mine", scale=3.0), Mine)
    with pytest.raises(ValueError, match=r"no head 'mine'; choose from nn, .* or name a class of your own"):
        make_head("mine")
    offer(monkeypatch, mine="tests.heads.test_own:Mine")
    head = make_head("mine").fit(clusters.features, clusters.labels)
    head.save(tmp_path / "mine.safetensors")
    loaded = load_head(tmp_path / "mine.safetensors")
    assert isinstance(loaded, Mine)
    assert np.array_equal(loaded.predict_proba(clusters.features), head.predict_proba(clusters.features))
    with pytest.raises(ValueError, match=r"is no fewshot_dpkl.Head; fit it by itself, or give it to"):
        make_head("sklearn.linear_model:LogisticRegression")


def test_a_saved_head_cannot_name_a_module_to_import(tmp_path, clusters):
    class Sly(CentroidHead):
        name = "tests.heads.surprise:Head"

    Sly().fit(clusters.features, clusters.labels).save(tmp_path / "sly.safetensors")
    with pytest.raises(ValueError, match="there is no head of that name"):
        load_head(tmp_path / "sly.safetensors")


def test_names_in_tables_are_short_and_never_twice_the_same():
    paths = ["nn", "tests.heads.test_own:Mine", "sklearn.linear_model:LogisticRegression"]
    found = dict(find_heads([*paths, "tests.heads.test_own:LogisticRegression"], HEADS))
    assert list(found) == ["nn", "mine", "LogisticRegression", "tests.heads.test_own:LogisticRegression"]
    assert isinstance(found["LogisticRegression"].classifier, LogisticRegression)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "nowhere.at_all:Head",
            "importing nowhere.at_all failed .*No module.*; install it, or start",
        ),
        ("tests.heads.test_own:Yours", "has no attribute 'Yours'"),
        ("broken:Head", r"importing broken failed \(ZeroDivisionError"),
        ("sklearn.ensemble:VotingClassifier", "cannot be made without parameters"),
        ("tests.heads.test_own:StandardScaler", "StandardScaler is neither a Head nor"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_sentence(path, words, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match=words):
        list(find_heads([path], HEADS))
