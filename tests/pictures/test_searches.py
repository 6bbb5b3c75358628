"""FewShotClassifier among scikit-learn's tools: arrays and Series of paths, searches, no answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from fewshot_dpkl import CentroidHead, DPKLHead, FewShotClassifier, make_head
from fewshot_dpkl.heads.suggest import suggest
from tests.pictures.test_classifier import QUICK, task, tiny

__all__ = ["task"]  # a fixture


class Doubting(CentroidHead):
    """A fake head to which the first picture of every question is a stranger."""

    def unfamiliarity(self, X):
        return np.where(np.arange(len(X)) == 0, 0.97, 0.2)


@pytest.mark.parametrize("kind", ["array", "strings", "tuple", "series"])
def test_arrays_and_series_of_paths_are_lists_of_paths(task, kind):
    paths, labels, query, _ = task
    expected = FewShotClassifier(tiny(), "nn").fit(paths, labels).predict_proba(query)
    if kind == "series":
        pandas = pytest.importorskip("pandas")
    made = {
        "array": np.array,
        "strings": lambda x: np.array(list(map(str, x))),
        "tuple": tuple,
        "series": lambda x: pandas.Series(list(map(str, x)), index=range(7, 7 + len(x))),
    }[kind]
    classifier = FewShotClassifier(tiny(), "nn").fit(made(paths), made(labels))
    assert np.array_equal(classifier.predict_proba(made(query)), expected)


def test_cross_validation_and_searches_work_by_scikit_learns_conventions(task):
    paths, labels, query, truth = map(np.array, task)
    folds = StratifiedKFold(3)
    classifier = FewShotClassifier(tiny(), "nn")
    assert cross_val_score(classifier, paths, labels, cv=folds).tolist() == [1, 1, 1]
    choices = {"head": ["nn", "centroid"], "threshold": [0.0, 1.0]}
    search = GridSearchCV(classifier, choices, cv=folds, error_score="raise").fit(paths, labels)
    assert search.best_params_ == {"head": "nn", "threshold": 0.0}
    assert search.score(query, truth) == 1
    for head in (QUICK, "dpkl"):
        rates = {"head__learning_rate": [1e-3, 1e-2], "head__epochs": [10]}
        search = GridSearchCV(FewShotClassifier(tiny(), head), rates, cv=folds, error_score="raise")
        best = search.fit(paths, labels).best_estimator_
        assert isinstance(best.head_, DPKLHead)
        assert best.head_.learning_rate == search.best_params_["head__learning_rate"]
        assert best.head_.epochs == 10
    assert QUICK.learning_rate == 1e-3  # the user's own head is left alone
    assert clone(FewShotClassifier(head=QUICK)).get_params()["head__epochs"] == 10
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        FewShotClassifier(head="nn").set_params(head__depth=3)


def test_a_classifier_of_scikit_learn_is_refused_at_fit(task):
    paths, labels, query, truth = task
    with pytest.raises(ValueError, match=r"head is LogisticRegression, no head .* classifier\.embed"):
        FewShotClassifier(tiny(), LogisticRegression()).fit(paths, labels)
    embed = FewShotClassifier(tiny()).embed  # the way that the sentence names
    assert LogisticRegression().fit(embed(paths), labels).score(embed(query), truth) > 0.5


def test_unreadable_pictures_are_skipped_by_name_where_asked(task, tmp_path):
    paths, labels, query, truth = task
    (tmp_path / "empty.png").touch()
    bad = tmp_path / "empty.png"
    classifier = FewShotClassifier(tiny(), "nn", on_unreadable="skip")
    with pytest.warns(UserWarning, match=r"left out .*empty\.png: the file is empty"):
        classifier.fit([bad, *paths], ["a-0", *labels])
    plain = FewShotClassifier(tiny(), "nn").fit(paths, labels)
    probabilities = classifier.predict_proba([query[0], bad, query[1]])
    assert np.array_equal(probabilities[[0, 2]], plain.predict_proba(query[:2]))
    assert np.isnan(probabilities[1]).all()
    assert classifier.predict([query[0], bad]).tolist() == [truth[0], None]
    assert classifier.score([query[0], bad], [truth[0], "a-0"]) == 0.5
    with pytest.raises(ValueError, match="class 'new' has no picture that can be read"):
        classifier.fit([bad, *paths], ["new", *labels])
    with pytest.raises(ValueError, match=r"empty\.png: the file is empty"):
        classifier.predict([bad])
    with pytest.raises(ValueError, match="on_unreadable is 'maybe'; use 'raise' or 'skip'"):
        FewShotClassifier(tiny(), on_unreadable="maybe").fit(paths, labels)


def test_not_sure_and_none_of_these(task):
    paths, labels, query, _ = task
    numbers = [int(label[-1]) for label in labels]
    classifier = FewShotClassifier(tiny(), Doubting(), threshold=0.0).fit(paths, numbers)
    answers = classifier.predict(query)
    assert answers.dtype == np.array(numbers).dtype
    assert classifier.predict(query, unknown=0.05).tolist() == ["none of these", *answers.tolist()[1:]]
    assert classifier.predict(query, unknown=0.01).tolist() == answers.tolist()
    assert classifier.unfamiliarity(query[:2]).tolist() == [0.97, 0.2]
    sure = classifier.predict_proba(query).max(1)
    classifier.set_params(threshold=float(np.median(sure)))
    said = classifier.predict(query)
    assert [answer == "not sure" for answer in said] == (sure < np.median(sure)).tolist()
    with pytest.raises(ValueError, match=r"unknown is 5; expected a share from 0 to 1"):
        classifier.predict(query, unknown=5)
    with pytest.raises(ValueError, match=r"threshold is -1; expected a share"):
        FewShotClassifier(tiny(), threshold=-1).fit(paths, labels)


def test_the_backbone_runs_where_it_is_asked_to(task):
    paths, labels, _, _ = task
    classifier = FewShotClassifier(tiny(), "nn", device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # a device without contents, on every machine
        classifier.fit(paths, labels)
    assert next(classifier.backbone_.parameters()).device == torch.device("meta")
    assert FewShotClassifier(tiny(), "nn", device="cpu").fit(paths, labels).score(paths, labels) == 1


def test_no_pictures_get_a_sentence_of_their_own(task):
    paths, labels, _, _ = task
    classifier = FewShotClassifier(tiny(), "nn").fit(paths, labels)
    for nothing in ([], (), np.array([]), np.zeros((0, 8, 8, 3), np.uint8)):
        with pytest.raises(ValueError, match="there are no pictures; give at least one"):
            classifier.predict(nothing)


def test_the_default_head_says_what_is_unfamiliar_and_so_does_what_was_saved(task, tmp_path):
    paths, labels, query, _ = task
    classifier = FewShotClassifier(tiny()).fit(paths, labels)
    strange = classifier.unfamiliarity(query)
    assert strange.shape == (len(query),)
    assert ((strange >= 0) & (strange <= 1)).all()
    for share in (0.05, 0.5, 1.0):
        refused = classifier.predict(query, unknown=share) == "none of these"
        assert refused.tolist() == (strange > 1 - share).tolist()
    classifier.save(tmp_path / "c.safetensors")
    loaded = FewShotClassifier.load(tmp_path / "c.safetensors", tiny())
    assert np.array_equal(loaded.unfamiliarity(query), strange)
    with pytest.raises(ValueError, match="the head logreg cannot say how unfamiliar a picture is"):
        FewShotClassifier(tiny(), "logreg").fit(paths, labels).predict(query, unknown=0.05)


def test_it_learns_from_pictures_without_labels_and_suggests_some(task, tmp_path):
    paths, labels, query, _ = task
    classifier = FewShotClassifier(tiny(), "centroid", device="cpu")
    plain = classifier.fit(paths, labels).predict_proba(query)
    features = classifier.embed([*paths, *query])
    taught = classifier.fit(paths, labels, unlabeled=query)
    n = len(paths)
    by_hand = make_head("centroid").fit(features[:n], labels, features[n:]).predict_proba(features[n:])
    assert taught.predict_proba(query) == pytest.approx(by_hand, abs=1e-5)
    assert not np.allclose(by_hand, plain)
    assert taught.suggest(query, 3).tolist() == suggest(features[n:], features[:n], 3).tolist()
    taught.save(tmp_path / "taught.safetensors")
    with pytest.raises(ValueError, match="does not hold the pictures it was fitted on"):
        FewShotClassifier.load(tmp_path / "taught.safetensors", tiny()).suggest(query, 3)
    with pytest.raises(ValueError, match="head nn cannot learn from unlabelled examples"):
        FewShotClassifier(tiny(), "nn").fit(paths, labels, unlabeled=query)
