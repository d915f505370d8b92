"""The fixtures of a small study, for the tests of stores and sweeps."""

from sweep.study import again, base, finished, store
from web.conftest import model

__all__ = ["again", "base", "finished", "model", "store"]
