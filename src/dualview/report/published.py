"""What the papers report, to compare with what was measured.

Dai et al. 2022 (arXiv 2212.10559v3), tables 1 to 5, and Deutch et al. 2024 (arXiv 2311.07772), tables 1 and 2: GPT 1.3B
and 2.7B of the fairseq dense family, 32 shots (19 on CB, 22 on AGNews). Their seeds and learning rates were chosen on
the very queries that are reported, and their records taken at label 0. One row is in no paper: the chance level of
Dai et al.'s Rec2FTP, P(ICL right | ZSL wrong), which follows from their table 1 and the counts in Deutch et al.'s
released logs.
"""

from __future__ import annotations

from collections.abc import Mapping

SIX_TASKS = ("sst2", "sst5", "mr", "subj", "agnews", "cb")

_TABLES: dict[str, dict[str, tuple[float | None, ...]]] = {
    "Dai et al., 1.3B": {
        "accuracy.zsl": (0.705, 0.393, 0.659, 0.726, 0.463, 0.375),
        "accuracy.ft": (0.739, 0.395, 0.730, 0.778, 0.653, 0.554),
        "accuracy.icl": (0.927, 0.450, 0.890, 0.900, 0.792, 0.571),
        "rec2ftp.value": (0.9184, 0.6667, 0.9708, 0.8717, 0.8308, 0.8750),
        "rec2ftp.chance": (0.883, 0.271, 0.874, 0.794, 0.728, 0.629),
        "sim_aou.normalised": (0.110, 0.080, 0.222, 0.191, 0.281, 0.234),
        "sim_am.before": (0.555, 0.391, 0.398, 0.378, 0.152, 0.152),
        "sim_am.after": (0.585, 0.404, 0.498, 0.490, 0.496, 0.177),
        "kendall.released.tau_token": (0.192, 0.151, 0.173, 0.181, 0.190, 0.274),
    },
    "Dai et al., 2.7B": {
        "accuracy.zsl": (0.714, 0.359, 0.609, 0.752, 0.398, 0.429),
        "accuracy.ft": (0.769, 0.391, 0.800, 0.861, 0.657, 0.571),
        "accuracy.icl": (0.950, 0.465, 0.913, 0.903, 0.803, 0.554),
        "rec2ftp.value": (0.9683, 0.7160, 0.9583, 0.8763, 0.8444, 1.0),
        "sim_aou.normalised": (0.195, 0.323, 0.157, 0.212, 0.333, 0.130),
        "sim_am.before": (0.687, 0.380, 0.314, 0.346, 0.172, 0.228),
        "sim_am.after": (0.687, 0.492, 0.347, 0.374, 0.485, 0.217),
        "kendall.released.tau_token": (0.213, 0.177, 0.264, 0.203, 0.201, 0.225),
    },
    "Deutch et al., 1.3B": {
        "sim_aou.normalised": (0.11, 0.09, 0.22, 0.18, 0.31, 0.21),
        "sim_aou.raw": (0.05, 0.04, 0.17, 0.06, 0.18, 0.11),
        "sim_am.after": (0.59, 0.40, 0.49, 0.45, 0.48, 0.20),
        "sim_am.delta": (0.15, 0.31, 0.14, 0.25, 0.50, 0.25),
    },
    "Deutch et al., 1.3B, layer-causal": {
        "sim_aou.normalised": (0.22, 0.11, 0.33, 0.35, 0.33, 0.34),
        "sim_aou.raw": (0.13, 0.11, 0.21, 0.18, 0.13, 0.24),
        "sim_am.after": (0.58, 0.39, 0.30, 0.27, 0.12, 0.04),
        "sim_am.delta": (0.30, 0.33, 0.26, 0.32, 0.43, 0.38),
    },
    "Deutch et al., 1.3B, untrained": {
        "sim_aou.raw": (0.09, 0.07, 0.18, 0.06, None, 0.04),
        "sim_am.delta": (0.11, 0.05, 0.16, 0.17, None, 0.26),
    },
    "Deutch et al., 1.3B, embeddings and norms trained": {
        "sim_aou.raw": (0.11, 0.06, 0.24, 0.20, None, 0.01),
        "sim_am.delta": (0.09, 0.03, 0.18, 0.16, None, 0.05),
    },
}


def published(task: str) -> Mapping[str, Mapping[str, float]]:
    """What each paper reports on a task, by source and then by the result file's key; empty for other tasks.

    >>> published("mr")["Dai et al., 1.3B"]["rec2ftp.value"]
    0.9708
    """
    if task not in SIX_TASKS:
        return {}
    at = SIX_TASKS.index(task)
    return {
        source: {key: value for key, row in rows.items() if (value := row[at]) is not None}
        for source, rows in _TABLES.items()
    }


def published_values(task: str, key: str) -> dict[str, float]:
    """What each paper reports of one number on a task, by source."""
    return {source: rows[key] for source, rows in published(task).items() if key in rows}
