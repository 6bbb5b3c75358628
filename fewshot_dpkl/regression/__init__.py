"""Small-data regression: GP, DKL and DPKL, with and without unlabelled inputs (sections 3.1 to 3.3, 4)."""

from fewshot_dpkl.regression.estimators import DKLRegressor, DPKLRegressor, GPRegressor, load_regressor

__all__ = ["DKLRegressor", "DPKLRegressor", "GPRegressor", "load_regressor"]
