"""Verbs beyond a comparison, a file for each: `explain`, `heads`, `compile`, `finetune`, and `certificate` (calibrate).

Each is one function that prepares a run, calls `duality.on_model`, and returns a result with `table()` and `to_json()`.
"""
