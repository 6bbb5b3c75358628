import dataclasses
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fewshot_dpkl import EpisodeSampler, evaluate, make_head, paired_difference
from fewshot_dpkl.evaluation.evaluator import by_class, paired_differences, run_head
from fewshot_dpkl.evaluation.metrics import mean_interval
from tests.heads.test_heads import quick


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


def test_differences_of_all_pairs_are_listed_once(clusters):
    results = {**evaluated(clusters), "again": evaluated(clusters)["nn"]}
    rows = paired_differences(results)
    assert [(row["head"], row["minus"]) for row in rows] == [
        ("dpkl", "nn"),
        ("again", "nn"),
        ("again", "dpkl"),
    ]
    assert (rows[2]["nll"], rows[2]["nll_ci95"]) == paired_difference(results["nn"], results["dpkl"], "nll")
    assert rows[1]["brier"] == rows[1]["brier_ci95"] == 0.0


def test_unseen_queries_change_no_other_figure(clusters):
    without, with_unseen = evaluated(clusters), evaluated(clusters, unseen=True)
    for name, result in with_unseen.items():
        assert without[name].unseen_auroc is None
        assert result.unseen_auroc.shape == (10,)
        assert ((result.unseen_auroc >= 0) & (result.unseen_auroc <= 1)).all()
        assert name != "nn" or result.unseen_auroc.mean() > 0.5
        for figure, values in without[name].per_episode.items():
            assert np.array_equal(values, result.per_episode[figure])
        assert np.array_equal(without[name].confusion, result.confusion)


def test_unseen_queries_are_those_of_the_sampler(clusters):
    """The AUROC of an episode, by asking the fitted head of scikit-learn's view."""
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=5)
    result = evaluate({"nn": quick("nn")}, clusters, sampler, 4, unseen=True)["nn"]
    drawn = sampler.draw(range(4), unseen=True)
    for e in range(4):
        x, y = clusters.features[drawn.support[e].ravel()], np.repeat(range(3), 2)
        head = quick("nn").fit(x, y)
        rows = np.concatenate([drawn.query[e].ravel(), drawn.unseen[e]])
        top = head.predict_proba(clusters.features[rows]).max(1)
        assert result.unseen_auroc[e] == pytest.approx(roc_auc_score(np.repeat([1, 0], [15, 5]), top))


def test_classes_agree_with_a_loop_over_queries(clusters):
    sampler = EpisodeSampler(clusters, way=3, shot=1, query=5)
    spoilt = dataclasses.replace(clusters, features=clusters.features + 2 * noise(clusters.features.shape))
    results = evaluate({"nn": quick("nn"), "centroid": quick("centroid")}, spoilt, sampler, 8)
    drawn = sampler.draw(range(8))
    asked, right, together, mistaken = Counter(), Counter(), Counter(), Counter()
    log_p, *_ = run_head(quick("nn"), torch.tensor(spoilt.features), drawn)
    for e in range(8):
        for c in range(3):
            for row in log_p[e, c]:
                true, answer = drawn.classes[e, c], drawn.classes[e, row.argmax()]
                asked[true] += 1
                right[true] += true == answer
                mistaken[true, answer] += true != answer
                together.update((true, other) for other in drawn.classes[e])
    rows = by_class(results, drawn.classes, clusters.class_names)
    assert len(rows) == len(asked)
    for row in rows:
        true = clusters.class_names.index(row["name"])
        assert row["queries"] == asked[true]
        assert row["accuracy"]["nn"] == pytest.approx(right[true] / asked[true])
        worst = row["taken_for"]["nn"]
        most = max(times for (of, _), times in mistaken.items() if of == true)
        if not most:
            assert worst is None
            continue
        pair = true, clusters.class_names.index(worst["class"])
        assert mistaken[pair] == most
        assert worst["share"] == pytest.approx(most / together[pair])
    assert sum(right.values()) < 0.8 * sum(asked.values())  # there was something to mistake


def noise(shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def test_no_head_sees_a_query_when_it_learns(clusters):
    """Changing the queries of one class must not change the answers to the others."""
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=5)
    batch = sampler.draw(range(2))
    for name in ("cosine", "blr", "dpkl", "logreg"):
        table = torch.tensor(clusters.features)
        before, *_ = run_head(quick(name), table, batch)
        changed = table.clone()
        rows = np.setdiff1d(batch.query[:, 0], batch.support)
        changed[rows] = changed[rows].flip(0) * 3
        after, *_ = run_head(quick(name), changed, batch)
        others = ~np.isin(batch.query[:, 1:], rows)
        torch.testing.assert_close(
            after[:, 1:][torch.tensor(others)], before[:, 1:][torch.tensor(others)], atol=1e-5, rtol=0
        )


def test_episode_numbers_must_be_positive(clusters):
    with pytest.raises(ValueError, match="episodes is 0"):
        evaluate({}, clusters, EpisodeSampler(clusters), 0)


def test_results_as_a_data_frame(clusters, monkeypatch):
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=4)
    result = evaluate({"nn": quick("nn")}, clusters, sampler, 5)["nn"]
    frame = result.to_frame()
    assert list(frame.columns) == ["accuracy", "nll", "brier", "accuracy_at_80"]
    assert frame.index.name == "episode"
    assert frame["nll"].to_numpy() == pytest.approx(result.nll)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needs pandas; pip install 'fewshot-dpkl\[pandas\]'"):
        result.to_frame()


def test_a_result_says_its_figures_in_a_line_and_in_a_small_table(clusters):
    sampler = EpisodeSampler(clusters, way=3, shot=2, query=4)
    result = evaluate({"nn": make_head("nn")}, clusters, sampler, 5)["nn"]
    text = repr(result)
    assert text.startswith(f"HeadResult(episodes 5, accuracy {100 * result.accuracy.mean():.2f} ± ")
    assert f"nll {result.nll.mean():.4f} ± " in text
    assert "\n" not in text
    assert len(text) < 200
    assert f"<td>{result.ece:.4f}</td>" in result._repr_html_()
