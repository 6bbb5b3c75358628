"""A local page: drop pictures into classes, drop pictures to classify, see probabilities."""

from fewshot_dpkl.pictures.page.server import make_server
from fewshot_dpkl.pictures.page.session import Limits, Session

__all__ = ["Limits", "Session", "make_server"]
