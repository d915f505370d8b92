"""The hub: the commit behind `owner/name@revision`, its files on this machine, and one sentence for each failure.

Models, data sets and plans all use this module. A name is looked up once in each process, so that everything a process
reads under one name comes from one commit, even if its branch moves in the meantime. The files live in the cache that
all Hugging Face libraries share (`HF_HOME`, `HF_HUB_CACHE`).
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dualview.io.atomic import write_text
from dualview.io.errors import UserError, first_line

Kind = Literal["model", "dataset"]
WORDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}
MAIN = "main"
_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NETWORK = ("httpx", "httpcore", "requests", "urllib3", "aiohttp")
"""Exceptions of these packages mean that a connection failed; which one is used depends on the client's version."""
_LOCAL = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""A cache that cannot be written."""
_PROBES, _PAUSE_SECONDS = 3, 1.0
_log = logging.getLogger("dualview.io.hub")


class NotOnHub(UserError):
    """The hub has nothing under this name, or nothing that this user may read."""


class NotCached(UserError):
    """The hub could not be asked, and the cache does not have it."""


@dataclass(frozen=True)
class HubName:
    """`owner/name@revision`; without a revision, the main branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """None where `name` cannot be a hub name.

        >>> HubName.parse("owner/name@v1.0"), HubName.parse("a/b/c")
        (HubName(repo='owner/name', revision='v1.0'), None)
        """
        match = _NAME.fullmatch(name)
        return None if match is None else cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True)
class Repo:
    """A repository at one commit."""

    kind: Kind
    name: HubName
    commit: str
    files: tuple[str, ...]
    """All files of the commit, or, where the hub could not be reached, those in the cache."""
    cached: bool
    """The hub was not reached: only what the cache holds can be read."""
    id: str
    """The hub's current name for it, which differs if the repository was renamed."""

    @property
    def folder(self) -> Path:
        return _storage(self.kind, self.name.repo) / "snapshots" / self.commit


_known: dict[tuple[Kind, HubName], Repo] = {}
_pins: dict[tuple[Kind, HubName], str] = {}


def pins() -> Mapping[tuple[Kind, HubName], str]:
    """The commit of every name that this process has looked up."""
    return {**_pins, **{key: repo.commit for key, repo in _known.items()}}


def pin(commits: Mapping[tuple[Kind, HubName], str]) -> None:
    """Use the commits that another process found, so that all workers of a sweep read the same files."""
    _pins.update(commits)


def forget() -> None:
    """Look up every name again."""
    _known.clear()
    _pins.clear()


def resolve(name: HubName, kind: Kind) -> Repo:
    """The commit behind a name: the hub's answer, or the cached one where the hub cannot be reached."""
    found = _known.get((kind, name))
    if found is not None:
        return found
    quiet()
    constants: Any = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return _in_cache(name, kind, "HF_HUB_OFFLINE is set")
    asked = _pins.get((kind, name), name.revision)
    api: Any = importlib.import_module("huggingface_hub").HfApi()
    try:
        info = api.repo_info(name.repo, repo_type=kind, revision=asked, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the client raises its own, the network's and validation errors
        if not _is_down(error):
            raise explained(error, name, kind) from error
        why = f"the hub at {constants.ENDPOINT} could not be reached ({_reason(error)})"
        repo = _in_cache(name, kind, why)
        _log.warning(f"dualview: {why}; reading {name} from the cache, commit {repo.commit}.")
        return repo
    files = tuple(sorted(str(file.rfilename) for file in info.siblings or ()))
    _known[kind, name] = Repo(kind, name, str(info.sha), files, cached=False, id=str(info.id))
    return _known[kind, name]


def fetch(repo: Repo, files: Sequence[str], *, into: Path | None = None) -> Path:
    """The folder with these files of a repository, downloaded where they are not in the cache yet.

    `into` is a folder to download to in place of the shared cache; a bar on a terminal then shows the progress.
    """
    download: Any = importlib.import_module("huggingface_hub").hf_hub_download
    for file in files:
        if (repo.folder / file).is_file():
            if into is not None:
                shutil.copyfile(repo.folder / file, into / file)
            continue
        if repo.cached:
            raise incomplete(repo, file)
        probe(repo, file)
        try:
            with _bar() if into is not None else nullcontext():
                download(repo.name.repo, file, repo_type=repo.kind, revision=repo.commit, local_dir=into)
        except Exception as error:
            raise explained(error, repo.name, repo.kind, file) from error
    if into is not None:
        return into
    _remember(repo)
    return repo.folder


@contextmanager
def _bar() -> Generator[None]:
    """The client's own progress bar, which it shows on a terminal only."""
    quiet()  # importing the client's parts sets the level of its messages again
    importlib.import_module("huggingface_hub.utils").enable_progress_bars()
    try:
        yield
    finally:
        quiet()


def probe(repo: Repo, file: str) -> None:
    """Ask for a file's size alone, to find out whether it may be read and whether the hub answers at all.

    The client itself would retry an unresponsive hub six times and wait a minute for each.
    """
    client: Any = importlib.import_module("huggingface_hub")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    url = client.hf_hub_url(repo.name.repo, file, repo_type=repo.kind, revision=repo.commit)
    for attempt in range(1, _PROBES + 1):
        try:
            client.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return
        except Exception as error:
            if attempt == _PROBES or not _is_down(error):
                raise explained(error, repo.name, repo.kind, file) from error
        time.sleep(_PAUSE_SECONDS)


def quiet() -> None:
    """Turn off the client's progress bars and warnings: dualview reports what matters in one sentence."""
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


# ---------------------------------------------------------------------------------------------------------- the cache


def _storage(kind: Kind, repo: str) -> Path:
    constants: Any = importlib.import_module("huggingface_hub.constants")
    return Path(os.fspath(constants.HF_HUB_CACHE)) / f"{kind}s--{repo.replace('/', '--')}"


def _in_cache(name: HubName, kind: Kind, why: str) -> Repo:
    storage = _storage(kind, name.repo)
    revision = _pins.get((kind, name)) or name.revision or MAIN
    try:
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = storage / "snapshots" / commit
    # A data set needs no file here: its rows are in the cache of `datasets`.
    if not _COMMIT.fullmatch(commit) or (kind == "model" and not folder.is_dir()):
        raise NotCached(
            f"The {WORDS[kind]} {name} is not in the cache and {why}; load it once with a connection to the hub."
        )
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return Repo(kind, name, commit, tuple(files), cached=True, id=name.repo)


def _remember(repo: Repo) -> None:
    """Write down the commit of a branch or tag, so that it can be found offline."""
    revision = repo.name.revision or MAIN
    reference = _storage(repo.kind, repo.name.repo) / "refs" / revision
    if repo.cached or _COMMIT.fullmatch(revision):
        return
    try:
        if not reference.is_file() or reference.read_text(encoding="utf-8") != repo.commit:
            reference.parent.mkdir(parents=True, exist_ok=True)
            write_text(reference, repo.commit)
    except OSError:  # a read-only cache; everything that was requested is in it
        return


# ----------------------------------------------------------------------------------------------------------- failures


def gated(name: HubName, kind: Kind) -> UserError:
    return UserError(
        f"The {WORDS[kind]} {name} is gated: only users who accepted its licence may read it; accept it on its page "
        "on the hub, then set HF_TOKEN or run `hf auth login`."
    )


def incomplete(repo: Repo, what: str) -> NotCached:
    """The cache lacks something and the hub cannot be reached."""
    return NotCached(
        f"The cache holds only a part of the {WORDS[repo.kind]} {repo.name} ({what} of commit {repo.commit[:8]} is "
        "missing) and the hub cannot be reached; load it once with a connection to the hub."
    )


def explained(error: Exception, name: HubName, kind: Kind, file: str | None = None) -> UserError:
    """What a failure of the hub's client means for the user, in one sentence."""
    found = {type(each).__name__: each for each in chain(error)}
    word, status = WORDS[kind], _status(error)
    if "GatedRepoError" in found or status == 403:
        return gated(name, kind)
    if "RevisionNotFoundError" in found:
        return UserError(
            f"The {word} {name.repo} has no revision {name.revision or MAIN!r}; name one of its branches, tags or full "
            "commit hashes after the @."
        )
    if "RepositoryNotFoundError" in found:
        return NotOnHub(
            f"The hub has no {word} {name.repo} that can be read here (it answers {status}); check the spelling, or if "
            "it is private set HF_TOKEN or run `hf auth login`."
        )
    if "EntryNotFoundError" in found or "RemoteEntryNotFoundError" in found:
        return UserError(f"The {word} {name} has no file {file}; check the name and the revision.")
    if status == 401:
        return UserError(f"The hub refused the token for {name} (401); set a valid HF_TOKEN or run `hf auth login`.")
    if status is not None:
        return UserError(f"The hub answered {status} when asked for the {word} {name}; try again later.")
    if any(isinstance(each, OSError) and each.errno == errno.ENOSPC for each in found.values()):
        return UserError(f"There is no space left to download {name}; free some space or set HF_HOME to another disk.")
    if _is_network(error):
        what = f"{file} of {name}" if file else f"{name}"
        return UserError(
            f"The download of {what} failed ({_reason(error)}), and so did several attempts to resume it; check the "
            "connection and run the command again."
        )
    local = next((each for each in chain(error) if isinstance(each, OSError) and each.errno in _LOCAL), None)
    if local is not None:
        where = f"{local.filename}: " if local.filename else ""
        return UserError(
            f"The {word} {name} could not be kept on this machine ({where}{local.strerror}); set HF_HOME to a folder "
            "that can be written."
        )
    return UserError(f"The {word} {name} could not be read ({_reason(error)}); look at its files on the hub.")


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _status(error: Exception) -> int | None:
    """The hub's HTTP status, if it answered."""
    codes = (getattr(getattr(each, "response", None), "status_code", None) for each in chain(error))
    return next((code for code in codes if isinstance(code, int) and code >= 400), None)


def _is_network(error: Exception) -> bool:
    if _status(error) is not None:
        return False
    if any(isinstance(each, ConnectionError | TimeoutError) for each in chain(error)):
        return True
    packages = {kind.__module__.partition(".")[0] for each in chain(error) for kind in type(each).__mro__}
    cut_short = any("Consistency check failed" in str(each) for each in chain(error))
    return cut_short or any(package.startswith(_NETWORK) for package in packages)


def _is_down(error: Exception) -> bool:
    """Whether the hub cannot answer now, so that the cache is used; 429 means too many requests."""
    status = _status(error)
    return _is_network(error) or (status is not None and (status >= 500 or status == 429))


def _reason(error: Exception) -> str:
    """The innermost message: a client wraps the socket's error in several layers."""
    messages = [first_line(each) for each in chain(error) if str(each).strip()]
    return messages[-1] if messages else type(error).__name__
