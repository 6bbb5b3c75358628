"""The features that come with the package, and what the heads make of them."""

import numpy as np
import pytest

from fewshot_dpkl import EpisodeSampler, FeatureSet, evaluate, make_head, paired_difference
from fewshot_dpkl.evaluation.features import SHIPPED


@pytest.fixture(scope="module")
def shipped() -> FeatureSet:
    return FeatureSet.load(SHIPPED)


def test_shipped_features_are_small_and_complete(shipped):
    assert SHIPPED.stat().st_size <= 8_000_000
    assert shipped.features.shape[1] == 1600
    assert len(shipped.class_names) == 20
    counts = np.bincount(shipped.labels)
    assert counts.min() == counts.max() >= 21
    assert shipped.card["split"] == "novel"


def test_dpkl_beats_the_nearest_neighbour_on_real_features(shipped):
    heads = {name: make_head(name) for name in ("nn", "dpkl")}
    results = evaluate(heads, shipped, EpisodeSampler(shipped), 40)
    difference, interval = paired_difference(results["dpkl"], results["nn"])
    assert difference > interval
