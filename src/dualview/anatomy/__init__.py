"""Where attention is in a model, and how a pass takes it over.

`dispatch` routes a model's attention to a `Strategy`, `kernels` computes attention in parts that merge, `layers` finds
the projections. An architecture with inline attention needs a detour in `legacy_attention`; no other needs an entry.
"""
