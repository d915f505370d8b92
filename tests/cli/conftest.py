"""The fixtures of a small study, for the tests of stores and sweeps."""

from sweep.study import again, base, finished, store

__all__ = ["again", "base", "finished", "store"]
