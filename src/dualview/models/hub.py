"""A model of the hub as a folder: which files of its repository are needed, and the code it takes from other ones.

transformers then reads the folder and never asks the hub itself, so a model comes from one commit, failures are
explained before anything large is downloaded, and the same call works offline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dualview.io import hub
from dualview.io.errors import UserError
from dualview.io.hub import HubName, Repo

_CONFIGS = ("config.json", "tokenizer_config.json")
"""Files whose `auto_map` may name code, in this repository or in another."""
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe")
_TOKENIZER = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken", "merges")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Snapshot:
    """A model's files on this machine."""

    folder: Path
    commit: str | None = None
    """None for a local folder."""
    code: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other repositories that the model takes Python code from, each with its commit."""


def fetch_model(name: HubName, *, trust_remote_code: bool, weights: bool = True) -> Snapshot:
    """Everything needed to load a model, or all but its weights; those, which take longest, come last."""
    repo = hub.resolve(name, "model")
    if "config.json" not in repo.files:
        gguf = "; it has GGUF files: download one and give its path" if _has(repo, ".gguf") else "; choose another"
        raise UserError(f"The hub's {name} is not a transformers model: it has no config.json{gguf}.")
    weights_file = _weights_file(repo) if weights else None
    if not any(file.startswith(_TOKENIZER) or file.endswith((".tiktoken", ".model")) for file in repo.files):
        if repo.cached:
            raise hub.incomplete(repo, "the tokenizer")
        raise UserError(f"The hub's {name} has no tokenizer files; choose a repository that comes with its tokenizer.")
    small = [file for file in repo.files if "/" not in file and file.endswith(_SMALL)]
    folder = hub.fetch(repo, ["config.json", *small])
    if trust_remote_code:
        hub.fetch(repo, _python(repo))
    if weights_file is not None:
        hub.fetch(repo, _shards(repo, weights_file))
    return Snapshot(folder, repo.commit, fetch_code(folder) if trust_remote_code else {})


def fetch_code(folder: Path) -> dict[str, str]:
    """Download the Python files that a model takes from other repositories; the commit of each."""
    commits: dict[str, str] = {}
    for other in sorted(set(_code_repos(folder))):
        repo = hub.resolve(HubName(other), "model")
        hub.fetch(repo, _python(repo))
        commits[other] = repo.commit
    return commits


def code_commits(where: Path | HubName) -> dict[str, str]:
    """The commits of the code that a model would take from other repositories; of the model only settings are read."""
    if isinstance(where, HubName):
        repo = hub.resolve(where, "model")
        where = hub.fetch(repo, [file for file in _CONFIGS if file in repo.files])
    return {other: hub.resolve(HubName(other), "model").commit for other in sorted(set(_code_repos(where)))}


def _code_repos(folder: Path) -> Iterator[str]:
    """The repositories before `--` in `auto_map` entries such as `other/repo--modeling.TheirModel`."""
    for name in _CONFIGS:
        stated = _settings(folder / name).get("auto_map")
        listed = list(cast("dict[str, Any]", stated).values()) if isinstance(stated, dict) else [stated]
        for entry in listed:
            several = cast("list[Any]", entry) if isinstance(entry, list | tuple) else [entry]
            yield from (each.partition("--")[0] for each in several if isinstance(each, str) and "--" in each)


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading reports what is wrong with it
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _shards(repo: Repo, weights: str) -> list[str]:
    if not weights.endswith(".index.json"):
        return [weights]
    listed = _settings(repo.folder / weights).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"The hub's {repo.name} lists no weights in {weights}; choose another revision.")
    shards = sorted({str(shard) for shard in cast("dict[str, Any]", listed).values()})
    for shard in shards:
        if shard not in repo.files and not repo.cached:
            raise UserError(f"The hub's {repo.name} lacks {shard}, which its {weights} names; choose another revision.")
    return shards


def _weights_file(repo: Repo) -> str:
    """The file with the weights, or with the list of their shards."""
    file = _WEIGHTS if _WEIGHTS in repo.files else _INDEX if _INDEX in repo.files else _named_weights(repo)
    if file in repo.files:
        return file
    if repo.cached:
        raise hub.incomplete(repo, _WEIGHTS)
    pickled = "only pickled ones, which dualview never opens" if _has(repo, ".bin") else "none that can be read"
    raise UserError(
        f"The hub's {repo.name} has no weights in safetensors ({pickled}); look for a converted revision or repository."
    )


def _named_weights(repo: Repo) -> str:
    """The file that the configuration names for the weights, where it does."""
    return str(_settings(hub.fetch(repo, ["config.json"]) / "config.json").get("transformers_weights"))


def _python(repo: Repo) -> list[str]:
    return [file for file in repo.files if file.endswith(".py")]


def _has(repo: Repo, ending: str) -> bool:
    return any(file.endswith(ending) for file in repo.files)
