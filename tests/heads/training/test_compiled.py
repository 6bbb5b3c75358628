"""Training and answers in C: the same as torch's, and never missed where they cannot be had."""

import os
import re
import threading
import warnings

import numpy as np
import pytest
import torch

from fewshot_dpkl import BLRHead, BNNHead, CosineHead, DBLRHead, DPKLHead
from fewshot_dpkl.heads.training import check, compiled, native
from tests.heads.test_heads import task

SMALL = dict(epochs=12, learning_rate=3e-3)
LAYER = dict(latent=32, kappa_every=4, **SMALL)
CASES = {
    "random features": DPKLHead(frequencies=96, frequencies_per_step=32, **LAYER),
    "random features, uniform rotations": DPKLHead(frequencies=96, rotation="uniform", **LAYER),
    "random features, narrow": DPKLHead(frequencies=48, **LAYER | dict(latent=16)),
    "random features, wide": DPKLHead(frequencies=256, batch_size=3, **LAYER | dict(latent=128)),
    "closed form, rows of eight registers": DPKLHead(kernel="exact", batch_size=7, **LAYER | dict(latent=64)),
    "random features, wider than a rotation in C": DPKLHead(frequencies=256, **LAYER | dict(latent=256)),
    "random features, long phases": DPKLHead(frequencies=64, lengthscale=0.4, **LAYER),
    "random features, so few that values fall below the floor": DPKLHead(frequencies=16, **LAYER),
    "random features, the last block shorter": DPKLHead(frequencies=41, frequencies_per_step=20, **LAYER),
    "closed form": DPKLHead(kernel="exact", **LAYER),
    "closed form, short lengthscale": DPKLHead(kernel="exact", lengthscale=0.3, **LAYER),
    "closed form, where exp would vanish": DPKLHead(
        kernel="exact", lengthscale=0.06, **LAYER | dict(epochs=2, learning_rate=3e-4)
    ),
    "numbers that are multiples of nothing": DPKLHead(
        kernel="exact", embeddings=3, particles=7, batch_size=4, check_every=3, **LAYER | dict(latent=21)
    ),
    "one particle of each": DPKLHead(embeddings=1, particles=1, batch_size=1, frequencies=64, **LAYER),
    "all points in one batch": DPKLHead(batch_size=99, frequencies=128, **LAYER),
    "every look at κ by the other rule": DPKLHead(bandwidth="liu-wang", frequencies=64, **LAYER),
    "all dimensions": DPKLHead(span=False, frequencies=64, **LAYER),
    "all dimensions, normal start": DPKLHead(span=False, kernel="exact", start="normal", **LAYER),
    "DBLR": DBLRHead(**LAYER),
    "BLR": BLRHead(**SMALL),
    "BLR in all dimensions": BLRHead(span=False, **SMALL),
    "BLR, numbers that are multiples of nothing": BLRHead(particles=7, batch_size=3, **SMALL),
    "BLR of one particle": BLRHead(particles=1, **SMALL),
    "BLR of cosines": BLRHead(cosine=True, batch_size=7, **SMALL),
    "BLR whose particles attract each other": BLRHead(repulsion=-1.0, bandwidth="liu-wang", **SMALL),
    "BNN": BNNHead(latent=24, **SMALL),
    "BNN of plain logits": BNNHead(latent=16, cosine=False, batch_size=4, **SMALL),
}


@pytest.fixture
def calls(monkeypatch):
    """The functions of the library that were called."""
    if compiled.library() is None:
        pytest.skip("needs a C compiler: install one as `cc`, or name it in $CC")
    seen, call = [], native.call

    def watched(name, *arguments):
        seen.append(name)
        call(name, *arguments)

    monkeypatch.setattr(native, "call", watched)
    return seen


def episodes(number=5):
    """Support sets `[E, n, D]`, labels and queries."""
    drawn = [task(dimension=70, seed=seed) for seed in range(number)]
    x, y, xq = (torch.tensor(np.stack(arrays)) for arrays in list(zip(*drawn, strict=True))[:3])
    return x.float(), y, xq.float()


def log_proba(head, x, y, xq, seeds=(5, 6, 7, 8, 9)):
    return head.log_proba_episodes(head.fit_episodes(x, y, seeds), xq)


@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_are_those_of_torch(case, calls):
    """Against torch in float64, which C does not know."""
    x, y, xq = episodes()
    head = CASES[case]
    ours = log_proba(head, x, y, xq)
    assert {"run_steps", "answer"} <= set(calls)
    calls.clear()
    theirs = log_proba(head, x.double(), y, xq.double())
    assert not calls
    difference = (ours - theirs).abs().amax((1, 2))  # of each episode
    assert difference.median() < 5e-5 * max(1.0, float(theirs.abs().max()))
    assert difference.max() < 0.05 * max(1.0, float(theirs.abs().max()))  # a unit may pass its ReLU otherwise
    still = log_proba(type(head)(**{**head.get_params(), "learning_rate": 0.0}), x, y, xq)
    assert (ours - still).abs().max() > 0.005  # and it is training that agrees


@pytest.mark.parametrize("width", [16, 70])
def test_products_are_those_of_torch_and_leave_their_arguments_alone(width, calls):
    random = np.random.default_rng(0)
    a, b, onto = (
        torch.tensor(random.normal(size=size)).float() for size in ((3, 7, width), (3, 11, width), (3, 7, 11))
    )
    before = onto.clone()
    torch.testing.assert_close(native.product_of_rows(a, b), a @ b.mT, atol=1e-5, rtol=0)
    torch.testing.assert_close(native.product(a, b.mT), a @ b.mT, atol=1e-5, rtol=0)
    torch.testing.assert_close(native.product(a, b.mT, onto), a @ b.mT + onto, atol=1e-5, rtol=0)
    assert torch.equal(onto, before)


def test_the_mean_of_probabilities_far_apart_keeps_their_logarithms(calls):
    logs = torch.tensor([[-1.0, -900.0, -np.inf], [-300.0, -1000.0, -np.inf]])[None, None]  # E b P C
    expected = torch.tensor([-1.0, -900.0, -np.inf])[None, None] - np.log(2)
    torch.testing.assert_close(native.log_means(logs), expected)


@pytest.mark.parametrize("settings", [{}, dict(batch_size=7, momentum=0.5, weight_decay=0.1, scale=5.0)])
def test_cosines_descend_in_c_as_in_torch(settings, calls):
    x, y, xq = episodes()
    head = CosineHead(**{"learning_rate": 0.3, "epochs": 12, **settings})
    ours = log_proba(head, x, y, xq)
    assert calls == ["descend_cosines"]
    torch.testing.assert_close(ours.double(), log_proba(head, x.double(), y, xq.double()), atol=1e-5, rtol=0)
    assert len(calls) == 1
    still = log_proba(CosineHead(**{**head.get_params(), "learning_rate": 0.0}), x, y, xq)
    assert (ours - still).abs().max() > 0.1


def test_cosines_want_minibatches_of_some_points_and_take_any_number():
    x, y, xq, yq = task(dimension=70)
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        CosineHead(batch_size=0).fit(x, y)
    assert CosineHead(batch_size=10**12, epochs=20, learning_rate=0.5).fit(x, y).score(xq, yq) > 0.5


def test_an_episode_does_not_depend_on_those_beside_it(calls):
    x, y, _ = episodes()
    head = DPKLHead(frequencies=64, **LAYER)
    together = head.fit_episodes(x, y, range(5, 10))
    alone = head.fit_episodes(x[1:2], y[1:2], [6])
    assert "run_steps" in calls
    torch.testing.assert_close(alone["class_weights"][0], together["class_weights"][1], atol=1e-6, rtol=0)


def test_what_c_does_not_know_is_left_to_torch(calls):
    x, y, xq = episodes()
    head = DPKLHead(**{**LAYER, "epochs": 2}, optimizer="momentum")
    assert log_proba(head, x, y, xq).isfinite().all()
    assert "run_steps" not in calls


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    """Nothing compiled yet, and a folder of its own to keep it in."""
    if compiled.library() is None:
        pytest.skip("needs a C compiler: install one as `cc`, or name it in $CC")
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "FLAGS", ("-O1", *compiled.FLAGS[1:]))  # sooner done
    compiled.forget()
    yield tmp_path / "cache" / "compiled"
    compiled.forget()


def test_it_is_compiled_once_for_all_threads_and_kept(fresh_cache, monkeypatch):
    commands, output = [], compiled._output

    def watched(command):
        commands.append(command)
        return output(command)

    monkeypatch.setattr(compiled, "_output", watched)
    threads = [threading.Thread(target=compiled.library) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled.library() is not None
    assert len(commands) == 2  # one for the processor, one to compile
    assert fresh_cache.stat().st_mode & 0o777 == 0o700
    assert sorted(file.suffix for file in fresh_cache.iterdir()) == [".sha256", ".so"]
    compiled.forget()
    assert compiled.library() is not None
    assert len(commands) == 3


@pytest.mark.parametrize("harm", ["cut", "foreign", "no checksum"])
def test_a_library_that_is_not_what_was_written_is_compiled_again(harm, fresh_cache):
    path = compiled.outcome().path
    sound = path.read_bytes()
    if harm == "no checksum":
        path.with_suffix(".sha256").unlink()
    else:
        other = path.with_suffix(".other")  # not in place: this process has the library in its memory
        other.write_bytes(sound[:1000] if harm == "cut" else b"not a library")
        os.replace(other, path)
    compiled.forget()
    assert compiled.library() is not None
    assert path.read_bytes() == sound
    assert compiled.outcome().reason == ""


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users")
def test_the_files_of_another_user_are_never_loaded(fresh_cache, monkeypatch):
    assert compiled.library() is not None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    compiled.forget()
    with pytest.warns(UserWarning, match="belongs to another user; set FEWSHOT_DPKL_CACHE"):
        assert compiled.library() is None


def test_results_that_differ_are_not_used(fresh_cache, monkeypatch):
    right, calls = check.trained(), []

    def wrong_every_second_time():
        calls.append(1)
        return [log_rho + 0.1 * (len(calls) % 2 == 0) for log_rho in right]

    monkeypatch.setattr(check, "trained", wrong_every_second_time)
    compiled.forget()
    fresh_cache.with_name("other").mkdir()
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(fresh_cache.with_name("other")))
    with pytest.warns(UserWarning, match="differ from those of torch"):
        assert compiled.library() is None
    assert "differ" in compiled.outcome().reason
    assert not list(fresh_cache.with_name("other").rglob("*.so"))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "/no/such/compiler"}, "/no/such/compiler cannot be run: No such file"),
        ({"CC": "sh -c 'echo no room >&2; exit 1' cc"}, "sh failed: no room"),
        ({"CC": "sh -c 'sleep 20' cc"}, "sh took longer than 0.5 seconds"),
        ({"FEWSHOT_DPKL_COMPILE": "0"}, "FEWSHOT_DPKL_COMPILE is 0"),
        ({"FEWSHOT_DPKL_CACHE": __file__}, "Not a directory|File exists"),
    ],
    ids=["no compiler", "a compiler that fails", "a compiler that hangs", "not wanted", "no place for it"],
)
def test_without_it_torch_takes_the_steps_and_the_reason_is_kept(
    environment, reason, fresh_cache, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "hangs" in os.environ.get("PYTEST_CURRENT_TEST", ""):
        monkeypatch.setattr(compiled, "PATIENCE", 0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert compiled.library() is None
    assert bool(said) == ("FEWSHOT_DPKL_COMPILE" not in environment)
    x, y, xq, yq = task(dimension=70)
    assert DPKLHead(frequencies=64, **LAYER).fit(x, y).score(xq, yq) > 0.5
    assert not list(fresh_cache.rglob("*.so"))
    assert re.search(reason, compiled.outcome().reason)
