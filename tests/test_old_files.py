"""What release 0.1.0 saved is still read, with the same answers (tests/saved_by_0.1.0 was written by it)."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from fewshot_dpkl import FeatureSet, FewShotClassifier, find_backbone, load_head
from fewshot_dpkl.regression import load_regressor
from tests.conftest import ROOT

SAVED = ROOT / "tests" / "saved_by_0.1.0"
ANSWERS = np.load(SAVED / "answers.npz")


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "X"])
def test_heads_and_regressors(name):
    path = SAVED / f"{name}.safetensors"
    if name.startswith("regressor"):
        found = load_regressor(path).predict(ANSWERS["X"])
    else:
        found = load_head(path).predict_proba(ANSWERS["X"])
    np.testing.assert_allclose(found, ANSWERS[name], atol=1e-6)


def test_features():
    features = FeatureSet.load(SAVED / "features.npz")
    assert np.array_equal(features.features, ANSWERS["X"])
    assert list(features.class_names) == ["a", "b", "c"]


def test_classifiers(registered_backbones):
    path = SAVED / "classifier.safetensors"
    with safe_open(path, "np") as file:
        identity = json.loads(file.metadata()["fewshot_dpkl_classifier"])["identity"]
    if find_backbone("conv4-mini-imagenet").identity != identity:
        with pytest.raises(ValueError, match="conv4-mini-imagenet"):  # weights have been trained anew since
            FewShotClassifier.load(path)
        return
    classifier = FewShotClassifier.load(path)
    pictures = [np.full((84, 84, 3), value, "uint8") for value in (15, 210)]
    assert classifier.predict(pictures).tolist() == ["dark", "light"]
