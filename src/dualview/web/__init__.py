"""The explorer: a server (`app`, behind `policy`), what it computes, and the page in `static/`.

A new call of the page: a `Route` in `app` (or in `results`, for a store), its body a model in `state`.
"""
