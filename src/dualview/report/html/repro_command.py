"""The command line that repeats a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def command_of(options: Mapping[str, Any]) -> str:
    """`dualview run` with every option that differs from its default, writing to `out`.

    A protocol's presets are among these, so the protocol itself is not repeated: it would bring back those that the
    run had set to their defaults.

    >>> command_of({"task": "mr", "data": "my data", "lr": 0.003, "calibrate": True})
    "dualview run --task mr --data 'my data' --lr 0.003 --calibrate --out out"
    >>> command_of({"adapter": ["one", "two"]})
    'dualview run --adapter one --adapter two --out out'
    """
    words = ["dualview", "run"]
    repeated = [(name, one) for name, value in options.items() for one in (value if name == "adapter" else [value])]
    for name, value in repeated:
        if name == "protocol":
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:  # switches are off by default
            words.append(flag)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return " ".join(shlex.quote(word) for word in [*words, "--out", "out"])
