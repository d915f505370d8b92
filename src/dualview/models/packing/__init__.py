"""Queries packed side by side into rows, and whether a model allows it."""
