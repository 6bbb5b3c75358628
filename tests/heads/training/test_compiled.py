"""Training steps in C: the same as torch's, and never missed where they cannot be had."""

import numpy as np
import pytest
import torch

from fewshot_dpkl import DBLRHead, DPKLHead
from fewshot_dpkl.heads.training import compiled, particle
from tests.heads.test_heads import task

SMALL = dict(latent=32, epochs=12, learning_rate=3e-3, kappa_every=4)
CASES = {
    "random features": DPKLHead(frequencies=96, frequencies_per_step=32, **SMALL),
    "random features, long phases": DPKLHead(frequencies=64, lengthscale=0.4, **SMALL),
    "random features, so few that values fall below the floor": DPKLHead(frequencies=16, **SMALL),
    "closed form": DPKLHead(kernel="exact", **SMALL),
    "closed form, short lengthscale": DPKLHead(kernel="exact", lengthscale=0.3, **SMALL),
    "numbers that are multiples of nothing": DPKLHead(
        kernel="exact", embeddings=3, particles=7, batch_size=4, check_every=3, **SMALL
    ),
    "one particle of each": DPKLHead(embeddings=1, particles=1, batch_size=1, frequencies=64, **SMALL),
    "all points in one batch": DPKLHead(batch_size=99, frequencies=128, **SMALL),
    "DBLR": DBLRHead(**SMALL),
}


@pytest.fixture
def steps(monkeypatch):
    """How often training asked for compiled steps, and whether it got them."""
    if compiled.run_steps() is None:
        pytest.skip("needs a C compiler: install one as `cc`, or name it in $CC")
    asked = []

    def ask(*state):
        asked.append(compiled.compiled_steps(*state))
        return asked[-1]

    monkeypatch.setattr(particle, "compiled_steps", ask)
    return asked


def episodes(number=5):
    """Support sets `[E, n, D]`, labels and queries."""
    drawn = [task(dimension=70, seed=seed) for seed in range(number)]
    x, y, xq = (torch.tensor(np.stack(arrays)) for arrays in list(zip(*drawn, strict=True))[:3])
    return x.float(), y, xq.float()


def log_proba(head, x, y, xq, seeds=(5, 6, 7, 8, 9)):
    return head.log_proba_episodes(head.fit_episodes(x, y, seeds), xq)


@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_are_those_of_torch(case, steps):
    """Against torch in float64, which steps.c does not know."""
    x, y, xq = episodes()
    head = CASES[case]
    ours, theirs = log_proba(head, x, y, xq), log_proba(head, x.double(), y, xq.double())
    assert [step is not None for step in steps] == [True, False]
    difference = (ours - theirs).abs().amax((1, 2))  # of each episode
    assert difference.median() < 5e-5
    assert difference.max() < 0.05  # rounding can put a unit on the other side of its ReLU
    still = log_proba(DPKLHead(**{**head.get_params(), "learning_rate": 0.0}), x, y, xq)
    assert (ours - still).abs().max() > 0.01  # and it is training that agrees


def test_an_episode_does_not_depend_on_those_beside_it(steps):
    x, y, _ = episodes()
    head = DPKLHead(frequencies=64, **SMALL)
    together = head.fit_episodes(x, y, range(5, 10))
    alone = head.fit_episodes(x[1:2], y[1:2], [6])
    assert all(steps)
    torch.testing.assert_close(alone["class_weights"][0], together["class_weights"][1], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        dict(latent=24),
        dict(frequencies=80, frequencies_per_step=32),  # the last block is shorter
        dict(kernel="exact", lengthscale=0.1),  # needs logarithms
        dict(optimizer="momentum"),
        dict(span=False),
    ],
)
def test_what_steps_c_does_not_know_is_left_to_torch(settings, steps):
    x, y, xq = episodes()
    assert log_proba(DPKLHead(**{**SMALL, "epochs": 2, **settings}), x, y, xq).isfinite().all()
    assert steps == [None]


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    """Nothing compiled yet, and a folder of its own to keep it in."""
    monkeypatch.setenv("FEWSHOT_DPKL_CACHE", str(tmp_path / "cache"))
    compiled.run_steps.cache_clear()
    yield tmp_path / "cache"
    compiled.run_steps.cache_clear()


def test_it_is_compiled_once_and_kept(fresh_cache):
    if compiled.run_steps() is None:
        pytest.skip("needs a C compiler: install one as `cc`, or name it in $CC")
    (library,) = (fresh_cache / "compiled").iterdir()
    written = library.stat().st_mtime_ns
    compiled.run_steps.cache_clear()
    assert compiled.run_steps() is not None
    assert [file.stat().st_mtime_ns for file in (fresh_cache / "compiled").iterdir()] == [written]


@pytest.mark.parametrize(
    "environment",
    [
        {"CC": "/no/such/compiler"},
        {"CC": "false"},
        {"FEWSHOT_DPKL_COMPILE": "0"},
        {"FEWSHOT_DPKL_CACHE": __file__},
    ],
    ids=["no compiler", "a compiler that fails", "not wanted", "no place for it"],
)
def test_without_it_torch_takes_the_steps(environment, fresh_cache, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compiled.run_steps() is None
    x, y, xq, yq = task(dimension=70)
    assert DPKLHead(frequencies=64, **SMALL).fit(x, y).score(xq, yq) > 0.5
    assert not list(fresh_cache.rglob("*.so"))
