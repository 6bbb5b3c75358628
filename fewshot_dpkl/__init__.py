"""Few-shot learning on frozen features: DPKL (Mallick et al., 2021) and its rivals.

from fewshot_dpkl import DPKLHead
head = DPKLHead().fit(support_features, support_labels)
head.predict_proba(query_features)
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# `fewshot_dpkl.backbones` and `fewshot_dpkl.data` lie inside the package in a wheel, beside it in a checkout.
if not (Path(__path__[0]) / "backbones").exists():
    __path__.append(str(Path(__path__[0]).parent))

if TYPE_CHECKING:
    from fewshot_dpkl.public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Public names load torch and scikit-learn; `fewshot-dpkl --help` need not wait for them."""
    if not name.startswith("_") or name == "__all__":
        public = import_module("fewshot_dpkl.public")
        if name in globals():  # a room that the import has put here
            return globals()[name]
        if hasattr(public, name):
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
