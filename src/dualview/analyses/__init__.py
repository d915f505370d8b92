"""Verbs about one model, beyond a comparison: a file for each (`explain`, `heads`, `compile`, `finetune`, `certificate/`).

Each is one function that prepares a run, calls `duality.on_model`, and returns a result with `table()` and `to_json()`.
"""
