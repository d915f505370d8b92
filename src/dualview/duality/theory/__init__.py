"""The equations, each next to its paper, on plain tensors: no model, no transformers."""
