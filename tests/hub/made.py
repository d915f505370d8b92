"""Data sets for the hub of the tests, and tasks that read them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from equivalence import tiny


def parquet(rows: list[dict[str, Any]]) -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), made)
    return made.getvalue()


def card(**configs: tuple[str, ...]) -> bytes:
    """The README of a data set: configurations, each with its splits."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*.parquet"]
    return "\n".join([*lines, "---", "# Reviews", ""]).encode()


def data_files(seed: int = 1, config: str = "plain") -> dict[str, bytes]:
    """A small data set of one configuration with two splits."""
    return {
        "README.md": card(**{config: ("train", "test")}),
        f"{config}/train-0.parquet": parquet(tiny.rows(24, seed)),
        f"{config}/test-0.parquet": parquet(tiny.rows(12, seed + 100)),
    }


def task_file(folder: Path, train: str, validation: str) -> str:
    """A task whose rows come from the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = {"name": "tiny", "template": "Review: {text} Sentiment:", "labels": tiny.LABELS}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**stated, "train": train, "validation": validation}), encoding="utf-8")
    return str(path)
