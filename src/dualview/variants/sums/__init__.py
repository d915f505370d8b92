"""Sums over the tokens that a query reads: which they are, how to sum them fast, and how to keep them with a cache."""
