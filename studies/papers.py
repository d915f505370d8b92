"""Which of the papers' numbers (`dualview.report.published`) are in which table of the findings, and their names."""

from __future__ import annotations

Rows = dict[str, tuple[str, str]]
"""By title: the source, and the result file's key."""

SMALL, LARGE, DEUTCH = "Dai et al., 1.3B", "Dai et al., 2.7B", "Deutch et al., 1.3B"
REDRAWN = (f"{DEUTCH}, embeddings and norms trained", f"{DEUTCH}, untrained")
SETTINGS = {"zero-shot": "accuracy.zsl", "fine-tuned": "accuracy.ft", "in-context": "accuracy.icl"}

PAPER: dict[str, Rows] = {
    "accuracy": {f"{title}, {of}": (of, key) for of in (SMALL, LARGE) for title, key in SETTINGS.items()},
    "rec2ftp": {
        **{of: (of, "rec2ftp.value") for of in (SMALL, LARGE)},
        f"its chance level, {SMALL} (from its table 1 and Deutch et al.'s logs)": (SMALL, "rec2ftp.chance"),
    },
    "sim_aou": {
        **{f"normalised, {of}": (of, "sim_aou.normalised") for of in (SMALL, LARGE, DEUTCH)},
        f"raw, {DEUTCH}": (DEUTCH, "sim_aou.raw"),
    },
    "sim_am": {
        **{f"{when}, {of}": (of, f"sim_am.{when}") for of in (SMALL, LARGE) for when in ("before", "after")},
        f"of the changes, {DEUTCH}": (DEUTCH, "sim_am.delta"),
    },
    "kendall": {of: (of, "kendall.released.tau_token") for of in (SMALL, LARGE)},
    "layer_causal": {
        f"{title}, {of}": (of, key)
        for title, key in (
            ("normalised SimAOU", "sim_aou.normalised"),
            ("raw SimAOU", "sim_aou.raw"),
            ("SimAM after", "sim_am.after"),
            ("SimAM of the changes", "sim_am.delta"),
        )
        for of in (DEUTCH, f"{DEUTCH}, layer-causal")
    },
    "untrained": {
        f"raw SimAOU, {DEUTCH}": (DEUTCH, "sim_aou.raw"),
        **{f"SimAOU (raw or normalised), {of}": (of, "sim_aou.raw") for of in REDRAWN},
        **{f"SimAM of the changes, {of}": (of, "sim_am.delta") for of in (DEUTCH, *REDRAWN)},
    },
}
