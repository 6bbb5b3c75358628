"""The studies behind the choices for speed: what they keep, and what they print."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import (
    bench_unlabeled,
    study_calibration,
    study_dpkl,
    study_reference,
    study_suggest,
    study_training,
    study_unlabelled,
)
from fewshot_dpkl import DPKLHead, EpisodeSampler, evaluate, make_head
from fewshot_dpkl.backbones import Recipe, Stage, build
from fewshot_dpkl.backbones.state import Training
from tests.heads.test_heads import quick


def test_a_finished_variant_is_read_back_and_only_for_the_same_settings(clusters, tmp_path, monkeypatch):
    first = study_dpkl.figures(quick("dpkl", epochs=2), clusters, 3, 2, tmp_path)
    direct = evaluate({"dpkl": quick("dpkl", epochs=2)}, clusters, EpisodeSampler(clusters), 3)["dpkl"]
    np.testing.assert_allclose(first["nll"], direct.nll, atol=1e-4)

    def refuse(*_, **__):
        raise AssertionError("was run again")

    monkeypatch.setattr(study_dpkl, "evaluate", refuse)
    again = study_dpkl.figures(quick("dpkl", epochs=2), clusters, 3, 2, tmp_path)
    assert np.array_equal(first["accuracy"], again["accuracy"])
    with pytest.raises(AssertionError, match="was run again"):
        study_dpkl.figures(quick("dpkl", epochs=3), clusters, 3, 2, tmp_path)


def test_the_table_pairs_every_variant_with_the_first():
    a = {"accuracy": np.array([0.5, 0.7]), "nll": np.array([1.0, 1.2]), "seconds": np.array(2.0)}
    b = {"accuracy": np.array([0.6, 0.9]), "nll": np.array([0.9, 1.1]), "seconds": np.array(1.0)}
    lines = study_dpkl.table({"a": a, "b": b}).splitlines()
    assert lines[2] == "| a | 60.00 |  | 1.1000 |  | 1.00 |"
    assert lines[3] == "| b | 75.00 | +15.00 ± 6.93 | 1.0000 | -0.1000 ± 0.0000 | 0.50 |"


def test_a_shared_start_leaves_the_other_draws_alone():
    x = torch.rand(2, 6, 30, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(2).repeat_interleave(3).expand(2, -1)
    still = dict(latent=8, embeddings=2, epochs=1, learning_rate=0.0)
    own, shared = (
        kind(**still).fit_episodes(x, labels, [5, 6]) for kind in (DPKLHead, study_dpkl.SharedStart)
    )
    assert not torch.equal(own["start"][0], own["start"][1])
    assert torch.equal(shared["start"][0], shared["start"][1])
    assert torch.equal(own["class_weights"], shared["class_weights"])


def test_reference_episodes_of_other_features_are_refused(tmp_path):
    path = tmp_path / "reference-rff.csv"
    path.write_text("episode,features,accuracy,nll,brier\n3,abc,0.5,1.0,0.4\n")
    assert study_reference.finished(path, "abc") == {3: [0.5, 1.0, 0.4]}
    with pytest.raises(ValueError, match="other features"):
        study_reference.finished(path, "def")


def test_a_cell_of_the_study_is_kept_and_its_failures_are_named(clusters, tmp_path):
    cells = [study_calibration.cell(tmp_path, "made up", clusters, 3, 2, "nn", 4) for _ in range(2)]
    assert np.array_equal(cells[0].nll, cells[1].nll)
    assert len(list(tmp_path.iterdir())) == 1
    heads = ("nn", study_calibration.DEFAULT_HEAD)
    worse = dataclasses.replace(cells[0], accuracy=cells[0].accuracy - 0.1, nll=cells[0].nll + 0.1)
    found = {("made up", "nn"): cells[0], ("made up", study_calibration.DEFAULT_HEAD): worse}
    lines = study_calibration.failures(found, heads, ["made up"], 5)
    assert lines[0] == "made up, 5 shots: accuracy -10.00 ± 0.00 to `nn`"
    assert lines[1].startswith("made up, 5 shots: NLL ")
    found["made up", study_calibration.DEFAULT_HEAD] = cells[0]
    lines = study_calibration.failures(found, heads, ["made up"], 5)
    assert [line for line in lines if "ECE" not in line] == []
    told = study_calibration.unseen_table({5: found}, heads, ["made up"]).splitlines()
    assert told[2] == f"| unfamiliarity of `nn` | {cells[0].unfamiliar_auroc.mean():.3f} |"
    assert told[-1] == f"| 5 shots | {100 * cells[0].refused.mean():.1f} % |"


def test_what_unlabelled_examples_give_is_paired_and_kept(clusters, tmp_path, monkeypatch):
    monkeypatch.setattr(study_unlabelled, "WAY", 3)
    monkeypatch.setattr(study_unlabelled, "QUERY", 4)
    given = (tmp_path, "made up", clusters, 1, "centroid", 5, 0, ["queries, even"])
    ((alone, taught),) = study_unlabelled.results(*given).values()
    assert taught.saw_unlabeled
    assert not alone.saw_unlabeled
    sampler = EpisodeSampler(clusters, way=3, shot=1, query=4)
    plain = evaluate({"centroid": make_head("centroid")}, clusters, sampler, 5)["centroid"]
    assert np.array_equal(alone.accuracy, plain.accuracy)
    monkeypatch.setattr(study_unlabelled, "one", lambda *_: pytest.fail("was run again"))
    assert np.array_equal(study_unlabelled.results(*given)["queries, even"][1].nll, taught.nll)
    table = bench_unlabeled.rows({"alone": alone, "ours": taught, "rival": alone}, 5)
    assert table[2][6] == table[1][5] == ""
    assert table[3][6] == table[2][5]


def test_labels_needed_are_read_off_the_curve():
    curve = np.array([0.5, 0.6, 0.8])
    assert study_suggest.labels_for(0.7, curve, 1) == pytest.approx(12.5)
    assert study_suggest.labels_for(0.4, curve, 1) == 5
    assert study_suggest.labels_for(0.9, curve, 1) == np.inf
    lines = study_suggest.plot(np.stack([curve, curve[[0, 2, 2]]]), 1).splitlines()
    assert lines[0] == " 80.0 |   +  *"
    assert lines[-2] == " 50.0 |*"


def test_suggestions_begin_where_random_choice_does(clusters):
    found = study_suggest.curves(clusters, "centroid", 4, 2, 5, seed=0)
    assert found.shape == (2, 4)
    assert found[0, 0] == found[1, 0]


def test_other_losses_are_the_plain_one_where_nothing_is_mixed_or_cropped(monkeypatch):
    recipe = Recipe(stages=(Stage(1, 32, 8),), precision="bfloat16")
    pictures = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8) % 3

    def loss(kind, count=8):
        training = Training(build("conv4"), 3, recipe, torch.device("cpu"))
        training.model.train()
        return kind(training, pictures[:count], targets[:count]).item()

    monkeypatch.setattr(study_training, "random_crops", lambda images, size, area: images)
    assert loss(study_training.views) == pytest.approx(loss(study_training.plain, 2), rel=0.01)
    half = loss(study_training.mixup)
    for share in (torch.ones, torch.zeros):  # the other picture of a pair is none of it, or all
        monkeypatch.setattr(study_training.torch, "rand", share)
        assert loss(study_training.mixup) == pytest.approx(loss(study_training.plain), rel=0.01)
    assert half != pytest.approx(loss(study_training.plain), rel=0.01)
