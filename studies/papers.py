"""The numbers of the papers that the study repeats, six tasks in the order of `aggregate.SIX`.

Dai et al. 2022 (arXiv 2212.10559, tables 1 to 5); Deutch et al. 2024 (arXiv 2311.07772, tables 1 and 2), where said.
Percentages are written as fractions, as dualview writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

PAPER: dict[str, dict[str, Sequence[float]]] = {
    "accuracy": {
        "zero-shot, GPT 1.3B": (0.705, 0.393, 0.659, 0.726, 0.463, 0.375),
        "fine-tuned, GPT 1.3B": (0.739, 0.395, 0.730, 0.778, 0.653, 0.554),
        "in-context, GPT 1.3B": (0.927, 0.450, 0.890, 0.900, 0.792, 0.571),
        "zero-shot, GPT 2.7B": (0.714, 0.359, 0.609, 0.752, 0.398, 0.429),
        "fine-tuned, GPT 2.7B": (0.769, 0.391, 0.800, 0.861, 0.657, 0.571),
        "in-context, GPT 2.7B": (0.950, 0.465, 0.913, 0.903, 0.803, 0.554),
    },
    "rec2ftp": {
        "GPT 1.3B": (0.9184, 0.6667, 0.9708, 0.8717, 0.8308, 0.8750),
        "GPT 2.7B": (0.9683, 0.7160, 0.9583, 0.8763, 0.8444, 1.0),
    },
    "sim_aou": {
        "normalised, GPT 1.3B": (0.110, 0.080, 0.222, 0.191, 0.281, 0.234),
        "normalised, GPT 2.7B": (0.195, 0.323, 0.157, 0.212, 0.333, 0.130),
        "raw, GPT 1.3B (Deutch et al.)": (0.05, 0.04, 0.17, 0.06, 0.18, 0.11),
    },
    "sim_am": {
        "before, GPT 1.3B": (0.555, 0.391, 0.398, 0.378, 0.152, 0.152),
        "after, GPT 1.3B": (0.585, 0.404, 0.498, 0.490, 0.496, 0.177),
        "before, GPT 2.7B": (0.687, 0.380, 0.314, 0.346, 0.172, 0.228),
        "after, GPT 2.7B": (0.687, 0.492, 0.347, 0.374, 0.485, 0.217),
        "of the changes, GPT 1.3B (Deutch et al.)": (0.15, 0.31, 0.14, 0.25, 0.50, 0.25),
    },
    "kendall": {
        "GPT 1.3B": (0.192, 0.151, 0.173, 0.181, 0.190, 0.274),
        "GPT 2.7B": (0.213, 0.177, 0.264, 0.203, 0.201, 0.225),
    },
    "layer_causal": {
        "raw SimAOU, gradient descent": (0.05, 0.04, 0.17, 0.06, 0.18, 0.11),
        "raw SimAOU, layer-causal": (0.13, 0.11, 0.21, 0.18, 0.13, 0.24),
        "SimAM of the changes, gradient descent": (0.15, 0.31, 0.14, 0.25, 0.50, 0.25),
        "SimAM of the changes, layer-causal": (0.30, 0.33, 0.26, 0.32, 0.43, 0.38),
    },
}
NAN = float("nan")
UNTRAINED: dict[str, Sequence[float]] = {
    "trained": (0.05, 0.04, 0.17, 0.06, NAN, 0.11),
    "embeddings and norms trained": (0.11, 0.06, 0.24, 0.20, NAN, 0.01),
    "untrained": (0.09, 0.07, 0.18, 0.06, NAN, 0.04),
}
