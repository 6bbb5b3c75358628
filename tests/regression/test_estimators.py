"""The regressors as a scikit-learn user meets them: conventions, saving, and bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import estimator_checks_generator

from fewshot_dpkl.regression import DKLRegressor, DPKLRegressor, GPRegressor, load_regressor

SMALL = {"hidden": (8,), "epochs": 20}
CHEAP = [
    GPRegressor(epochs=20, random_state=0),
    DKLRegressor(**SMALL, random_state=0),
    DPKLRegressor(**SMALL, particles=3, n_frequencies=10, random_state=0),
    DPKLRegressor(**SMALL, particles=3, kernel="exact", random_state=0),
]
NAMES = ["gp", "dkl", "dpkl", "dpkl-exact"]
each = pytest.mark.parametrize("regressor", CHEAP, ids=NAMES)


def problem(n=40, columns=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, columns))
    return x, 4 * np.sin(x[:, 0]) + 10 + 0.1 * rng.normal(size=n), rng.normal(size=(25, columns))


def checks():
    for regressor in CHEAP[:3]:
        quick = clone(regressor).set_params(epochs=10, lr=3e-2)
        for estimator, check in estimator_checks_generator(quick):
            yield pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


@each
def test_fits_predicts_and_knows_its_uncertainty(regressor):
    x, y, new = problem()
    fitted = clone(regressor).set_params(epochs=50, lr=1e-2).fit(x, y)
    mean, std = fitted.predict(new, return_std=True)
    assert mean.shape == std.shape == (25,)
    assert fitted.score(x, y) > 0.5
    assert fitted.n_features_in_ == 3
    assert (std >= y.std()).all(), "noise variance 1 of the standardised target is part of the prediction"
    far = fitted.predict(new + 100, return_std=True)[1] if isinstance(fitted, GPRegressor) else std
    assert (far >= std - 1e-9).all()


@each
def test_unlabelled_inputs_change_the_model(regressor):
    x, y, new = problem()
    supervised = clone(regressor).set_params(lr=1e-2, alpha=10.0).fit(x, y).predict(new)
    semi = clone(regressor).set_params(lr=1e-2, alpha=10.0).fit(x, y, unlabeled=new)
    assert not np.allclose(semi.predict(new), supervised)
    without = clone(regressor).set_params(lr=1e-2, alpha=0.0).fit(x, y, unlabeled=new)
    assert not np.allclose(semi.predict(new), without.predict(new))


@each
def test_one_seed_one_result_and_torch_or_numpy_alike(regressor):
    x, y, new = problem()
    first = clone(regressor).fit(x, y, unlabeled=new).predict(new)
    again = clone(regressor).fit(torch.tensor(x), torch.tensor(y), unlabeled=torch.tensor(new))
    assert np.array_equal(first, again.predict(torch.tensor(new)))
    if not isinstance(regressor, GPRegressor):
        other = clone(regressor).set_params(random_state=1).fit(x, y, unlabeled=new).predict(new)
        assert not np.array_equal(first, other)


def test_an_untrained_gp_is_scikit_learns():
    x, y, new = problem()
    ours = GPRegressor(lengthscale=1.3, noise=0.2, epochs=0, validation_fraction=0, standardize=False)
    reference = GaussianProcessRegressor(RBF(1.3), alpha=0.2, optimizer=None).fit(x, y)
    mean, std = ours.fit(x, y).predict(new, return_std=True)
    expected, expected_std = reference.predict(new, return_std=True)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    np.testing.assert_allclose(std**2, expected_std**2 + 0.2, atol=1e-6)
    assert ours.log_marginal_likelihood_ == pytest.approx(reference.log_marginal_likelihood_value_, rel=1e-6)


@each
def test_predictions_follow_the_units_of_the_target(regressor):
    x, y, new = problem()
    mean, std = clone(regressor).fit(x, y).predict(new, return_std=True)
    scaled_mean, scaled_std = (
        clone(regressor).fit(1000 * x - 7, 50 * y - 3).predict(1000 * new - 7, return_std=True)
    )
    np.testing.assert_allclose(scaled_mean, 50 * mean - 3, rtol=1e-3)
    np.testing.assert_allclose(scaled_std, 50 * std, rtol=1e-3)


@each
def test_samples_have_the_predicted_mean_and_deviation(regressor):
    x, y, new = problem()
    fitted = clone(regressor).fit(x, y)
    samples = fitted.sample_y(new, n_samples=4000, random_state=1)
    mean, std = fitted.predict(new, return_std=True)
    assert samples.shape == (25, 4000)
    np.testing.assert_allclose(samples.mean(1), mean, atol=5 * std.max() / 4000**0.5)
    np.testing.assert_allclose(samples.std(1), std, rtol=0.06)
    assert np.array_equal(samples, fitted.sample_y(new, n_samples=4000, random_state=1))


def test_latent_points_and_learnt_values_can_be_read():
    x, y, new = problem()
    dpkl = clone(CHEAP[2]).fit(x, y)
    assert dpkl.latent(new).shape == (3, 25, 2)
    assert dpkl.validation_error_.shape == (2,)
    gp = clone(CHEAP[0]).set_params(learn_noise=True).fit(x, y)
    assert gp.lengthscales_.shape == (3,)
    assert gp.noise_ < 1


def test_works_in_cross_validation():
    x, y, _ = problem(60)
    assert cross_val_score(DKLRegressor(lr=1e-2, random_state=0), x, y, cv=3).mean() > 0.5


@each
@pytest.mark.parametrize("n", [12, 40])
def test_a_saved_regressor_predicts_bit_for_bit(regressor, n, tmp_path):
    x, y, new = problem(n)
    fitted = clone(regressor).fit(x, y, unlabeled=new)
    fitted.save(tmp_path / "model.safetensors")
    loaded = load_regressor(tmp_path / "model.safetensors")
    assert loaded.get_params() == fitted.get_params()
    for a, b in zip(fitted.predict(new, return_std=True), loaded.predict(new, return_std=True), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(fitted.sample_y(new, 3), loaded.sample_y(new, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    x, y, _ = problem()
    path = tmp_path / "model.safetensors"
    clone(CHEAP[2]).fit(x, y).save(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()

    def refused(words, tensors=tensors, **changes):
        save_file(tensors, path, metadata={**metadata, **changes})
        with pytest.raises(ValueError, match=words):
            load_regressor(path)

    refused("format version 99, but this release reads version 2", version="99")
    refused("not a saved regressor", format="something")
    refused("there is no regressor 'os.system'", **{"class": "os.system"})
    params = json.loads(metadata["params"])
    refused(r"parameters has the shape .* expected \[1, m, P\]", params=json.dumps({**params, "hidden": [9]}))
    refused("its parameter hidden is 9", params=json.dumps({**params, "hidden": 9}))
    refused("its parameter particles is 10000000", params=json.dumps({**params, "particles": 10**7}))
    refused("P = 100", params=json.dumps({**params, "hidden": [10**9, 10**9]}))  # takes no memory
    refused("its parameter noise is None", params=json.dumps({**params, "noise": None}))
    refused("finite numbers", params=json.dumps({**params, "noise": float("inf")}))
    refused("no JSON object", params="[]")
    refused("weight_space is 2", weight_space="2")
    refused(r"\[1, 4\], expected", tensors={**tensors, "coefficients": torch.zeros(1, 4).double()})
    refused("it holds .* expected .*factor", tensors={k: v for k, v in tensors.items() if k != "factor"})
    refused("y_shift holds values that are", tensors={**tensors, "y_shift": torch.full((2,), torch.nan)})
    refused("its checksum does not fit", tensors={**tensors, "y_shift": torch.ones(2).double()})
    saved = {k: v for k, v in metadata.items() if k != "params"}
    save_file(tensors, path, metadata=saved)
    with pytest.raises(ValueError, match="params is missing in its header"):
        load_regressor(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is not a saved regressor; give a file written by"):
        load_regressor(path)
    with pytest.raises(FileNotFoundError):
        load_regressor(tmp_path / "absent.safetensors")


@each
def test_a_constant_target_is_predicted_with_a_warning(regressor):
    x, _, new = problem()
    fitted = clone(regressor)
    with pytest.warns(UserWarning, match=r"the target is constant \(0\.1\)"):
        fitted.fit(x, np.full(40, 0.1))
    mean, std = fitted.predict(new, return_std=True)
    np.testing.assert_allclose(mean, 0.1, rtol=1e-12)
    assert np.isfinite(std).all()


@each
def test_duplicate_rows_and_constant_columns_are_no_trouble(regressor):
    x, y, new = problem()
    x = np.repeat(x[:8], 5, axis=0)
    x[:, 1] = 0.3
    mean, std = clone(regressor).fit(x, y, unlabeled=np.repeat(new, 2, axis=0)).predict(new, return_std=True)
    assert np.isfinite(mean).all()
    assert np.isfinite(std).all()
    changed = new.copy()
    changed[:, 1] = 1e6
    np.testing.assert_array_equal(
        clone(regressor).fit(x, y).predict(changed), clone(regressor).fit(x, y).predict(new)
    )


@each
def test_one_column_and_two_points_are_enough(regressor):
    x, y, _ = problem(columns=1)
    assert np.isfinite(clone(regressor).fit(x, y).predict(x)).all()
    two = clone(regressor).fit(x[:2], y[:2], unlabeled=x[2:])
    mean, std = two.predict(x, return_std=True)
    assert np.isfinite([mean, std]).all()


@each
def test_bad_input_gets_one_sentence(regressor):
    x, y, new = problem()
    hole = x.copy()
    hole[3, 1] = np.nan
    fresh = clone(regressor)
    for arguments, words in [
        ((hole, y), "Input X contains NaN"),
        ((x, np.where(y > y.max() - 1e-9, np.nan, y)), "Input y contains NaN"),
        ((x[:1], y[:1]), "Found array with 1 sample"),
        ((x, y[:-1]), "inconsistent numbers of samples"),
        ((x, y, hole), "unlabeled contains NaN"),
        ((x, y, new[:, :2]), "unlabeled has 2 columns, but X has 3; give the same inputs in both"),
        ((np.where(x > 1, np.inf, x), y), "infinity"),
        ((x * 1e300, y), "too large to standardise"),
    ]:
        with pytest.raises(ValueError, match=words), np.errstate(all="ignore"):
            fresh.fit(*arguments)
    fresh.fit(x, y)
    with pytest.raises(ValueError, match=r"X has 2 features, but .* expecting 3"):
        fresh.predict(new[:, :2])
    with pytest.raises(ValueError, match="too far from the training points"):
        fresh.predict(np.full((2, 3), 1.7e308))


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("noise", 0.0),
        ("noise", np.nan),
        ("lr", -1.0),
        ("lengthscale", 0.0),
        ("particles", 0),
        ("n_frequencies", 0),
        ("epochs", -1),
        ("alpha", -1.0),
        ("check_every", 0),
        ("validation_fraction", 1.0),
        ("kernel", "matern"),
        ("prior", "two"),
        ("device", "mps"),
    ],
)
def test_a_parameter_that_cannot_work_is_named(parameter, value):
    x, y, _ = problem()
    with pytest.raises(ValueError, match=f"{parameter}"):
        clone(CHEAP[2]).set_params(**{parameter: value}).fit(x, y)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    n=st.integers(2, 30),
    columns=st.integers(1, 5),
    scale=st.sampled_from([1e-8, 1.0, 1e8]),
    seed=st.integers(0, 1000),
    which=st.integers(0, 3),
    semi=st.booleans(),
)
def test_whatever_the_data_the_prediction_is_finite(n, columns, scale, seed, which, semi):
    rng = np.random.default_rng(seed)
    x = np.round(rng.standard_cauchy(size=(n, columns)), 1) * scale  # ties, outliers
    y = np.round(rng.standard_cauchy(size=n), 1) * scale + (np.arange(n) == 0) * scale
    fitted = clone(CHEAP[which]).set_params(epochs=3).fit(x, y, unlabeled=x[::-1] * 2 if semi else None)
    mean, std = fitted.predict(x * 3, return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()
