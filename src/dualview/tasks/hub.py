"""Rows of a data set on the hub, read with the `datasets` package from one commit.

After almost any failure `datasets` returns the copy of the data set that it prepared last, from any commit. Here
the commit is resolved first, and only rows of that commit are used.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dualview.io import hub
from dualview.io.errors import UserError
from dualview.io.hub import HubName, Repo

CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps every public data set as Parquet, for those whose own branch is still a script."""
INSTEAD = "or read a folder of <task>/train.jsonl and <task>/validation.jsonl with --data"
_CARD = "README.md"
_SOURCE = re.compile(
    r"hf:(?P<names>[\w.-]+(?:/[\w.-]+)?)@(?P<revision>refs/[\w.-]+/[\w.-]+|[\w.-]+)(?:/(?P<config>[\w.-]+))?:(?P<split>\w+)"
)
_PLAIN = re.compile(r"hf:([\w.-]+(?:/[\w.-]+){0,2}):(\w+)")


@dataclass(frozen=True)
class HubAddress:
    """`hf:dataset/config:split`; an owner and a revision are possible: `hf:owner/dataset@revision/config:split`."""

    dataset: str
    config: str | None
    split: str
    revision: str | None = None

    @property
    def name(self) -> HubName:
        return HubName(self.dataset, self.revision)


HubRows = tuple[Sequence[Mapping[str, object]], str]
"""The rows of a split, and the commit they come from."""


def hub_addresses(source: str) -> tuple[HubAddress, ...]:
    """What `source` can mean, most likely first.

    Three names are owner, data set and configuration, one is a data set; of two the second may be either a data set
    (`SetFit/sst5`) or a configuration (`glue/sst2`), and only the hub knows. A revision ends the data set's name, so
    that it is clear which is which.

    >>> hub_addresses("hf:nyu-mll/glue/sst2:train")
    (HubAddress(dataset='nyu-mll/glue', config='sst2', split='train', revision=None),)
    >>> hub_addresses("hf:SetFit/sst5@v1:test")
    (HubAddress(dataset='SetFit/sst5', config=None, split='test', revision='v1'),)
    """
    pinned = _SOURCE.fullmatch(source)
    if pinned is not None:
        return (HubAddress(pinned["names"], pinned["config"], pinned["split"], pinned["revision"]),)
    match = _PLAIN.fullmatch(source)
    if match is None:
        raise UserError(
            f"{source!r} is not a hub source; write hf:dataset/config:split, or hf:dataset@revision/config:split."
        )
    names, split = match[1].split("/"), match[2]
    if len(names) == 3:
        return (HubAddress(f"{names[0]}/{names[1]}", names[2], split),)
    if len(names) == 1:
        return (HubAddress(names[0], None, split),)
    return (HubAddress("/".join(names), None, split), HubAddress(names[0], names[1], split))


def find(addresses: Iterable[HubAddress]) -> tuple[HubAddress, Repo]:
    """The first address that exists, with its commit."""
    missing: list[UserError] = []
    for address in addresses:
        try:
            return address, hub.resolve(address.name, "dataset")
        except (hub.NotOnHub, hub.NotCached) as error:
            missing.append(error)
    raise missing[0]


def read_hub(source: str) -> HubRows:
    """All rows of a source such as `hf:owner/dataset@revision/config:split`."""
    addresses = hub_addresses(source)
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"{source} needs the datasets package ({error}); run `pip install 'dualview[hub]'`, {INSTEAD}."
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are raised as well
    datasets.disable_progress_bars()
    try:
        return _read(datasets, *find(addresses))
    except UserError as error:
        reason = str(error).rstrip(".")
        raise type(error)(f"{source} cannot be loaded: {reason[0].lower()}{reason[1:]}, {INSTEAD}.") from error


def _read(datasets: Any, address: HubAddress, repo: Repo) -> HubRows:
    script = f"{repo.id.rpartition('/')[2]}.py"
    # The card shows whether the data set may be read, and names its configurations. A script is fetched but never
    # run, so that it is in the cache for offline runs.
    hub.fetch(repo, [file for file in (_CARD, script) if file in repo.files])
    if script in repo.files:
        if address.revision is not None:
            raise UserError(
                f"the data set {address.dataset} is a Python script at revision {address.revision}, which dualview "
                f"does not run; leave the revision out, or write @{CONVERTED}"
            )
        return _read(datasets, *find([replace(address, revision=CONVERTED)]))
    try:
        builder = _prepared(datasets, address, repo) or _prepare(datasets, address, repo)
        splits = sorted(str(split) for split in builder.info.splits or ())
        if address.split in splits:
            return list(builder.as_dataset(split=address.split)), repo.commit
    except Exception as error:  # the library raises its own, the hub's, the network's and the parsers' errors
        raise _explained(error, address) from error
    raise UserError(f"the data set {address.dataset} has no split {address.split!r}, only {', '.join(splits)}")


def _prepare(datasets: Any, address: HubAddress, repo: Repo) -> Any:
    """Let `datasets` download and convert the commit; a copy of another commit, its fallback, is refused."""
    if repo.cached:
        raise hub.incomplete(repo, f"configuration {address.config or 'default'}")
    data = [file for file in repo.files if not file.startswith(".") and file != _CARD]
    if data:
        hub.probe(repo, data[0])
    builder: Any = datasets.load_dataset_builder(repo.id, address.config, revision=repo.commit)
    if builder.hash != repo.commit:
        raise UserError(
            f"the commit {repo.commit[:8]} of the data set {address.dataset} could not be read in full, and the cache "
            "has only another one; check the connection and try again"
        )
    builder.download_and_prepare()
    return builder


def _prepared(datasets: Any, address: HubAddress, repo: Repo) -> Any | None:
    """What `datasets` has converted before from exactly this commit."""
    config = address.config or _default_config(repo)
    # A commit's hash is enough to find it: the folder is named after the data set as the hub calls it now.
    found = sorted(Path(datasets.config.HF_DATASETS_CACHE).glob(f"*/{config}/*/{repo.commit}/dataset_info.json"))
    if not found:
        return None
    folder, _, version, *_ = found[-1].parts[-5:]
    cache: Any = importlib.import_module("datasets.packaged_modules.cache.cache")
    return cache.Cache(
        dataset_name=folder.rpartition("___")[2],
        repo_id=folder.replace("___", "/"),
        config_name=config,
        version=version,
        hash=repo.commit,
    )


def _default_config(repo: Repo) -> str:
    """The configuration that is meant where none is named: the card's, or `default`."""
    if not (repo.folder / _CARD).is_file():
        return "default"
    card: Any = importlib.import_module("huggingface_hub").DatasetCard
    metadata: Any = importlib.import_module("datasets.utils.metadata").MetadataConfigs
    configs = metadata.from_dataset_card_data(card.load(repo.folder / _CARD).data)
    return str(configs.get_default_config_name() or "default")


def _explained(error: Exception, address: HubAddress) -> UserError:
    if isinstance(error, UserError):
        return error
    message = str(error)
    listed = re.search(r"\[[^\]]*\]", message)
    known = _names(listed[0]) if listed else ""
    if "BuilderConfig" in message and "not found" in message:
        return UserError(f"the data set {address.dataset} has no configuration {address.config!r}, only {known}")
    if "Config name is missing" in message:
        return UserError(
            f"the data set {address.dataset} has several configurations ({known}); name one of them, as in "
            f"hf:{address.name}/CONFIG:{address.split}"
        )
    if "gated dataset" in message:
        return hub.gated(address.name, "dataset")
    if any("column names don't match" in str(each) for each in hub.chain(error)):  # the last of many lines
        return UserError(
            f"the data set {address.dataset} could not be read (its files do not have the same columns); name a "
            "configuration whose files do"
        )
    return hub.explained(error, address.name, "dataset")


def _names(listed: str) -> str:
    try:
        return ", ".join(map(str, cast("list[Any]", ast.literal_eval(listed))))
    except (ValueError, SyntaxError):
        return listed
