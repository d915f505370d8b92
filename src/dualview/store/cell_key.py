"""Which cell is which: a key that holds everything that decides a cell's numbers, and a cheap one to plan with.

The *cell key* is made once the model is loaded and the prompts are made: the model's name, weights and configuration,
dtype, kind of device, attention path, every token id, the tokenizer, the task's rows, the settings, and the code that
computes: dualview's with the tasks of its library, and the model's own where it brings some. Where results are
written, and how many threads compute them, are no part of it.

The *plan key* is made from the options and the hashes of the files behind them, without reading a model: the store
remembers which plan key led to which cell key, so that ten thousand finished cells are known at a glance. A file that
changes changes the plan key, and so does a machine on which `--device auto` is another; the cell key then says whether
anything that matters did.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualview.io import assets
from dualview.io.download import sha256_of
from dualview.io.errors import UserError
from dualview.io.hub import HubName
from dualview.io.versions import UNKNOWN, version_of
from dualview.models.hub import code_commits
from dualview.options import RunOptions
from dualview.store.devices import auto_kind
from dualview.store.fingerprint import remote_code_hash, tokenizer_hash
from dualview.store.hub import commit_of
from dualview.tasks.hub import find, hub_addresses
from dualview.tasks.task import SPLITS, Task, load_task

if TYPE_CHECKING:
    from dualview.comparison.prepare import Prepared
    from dualview.models.language_model import LanguageModel

# What a run imports and yet decides no number; the embedded files that `assets` fetches are hashed themselves.
ASIDE = (
    "_download",
    "assets",
    "clock",
    "errors",
    "files",
    "hub",
    "output",
    "progress",
    "provenance",
    "result",
    "runs",
    "seeds",
    "sharing",
    "versions",
)
PATCHING = "compile"
"""Imported only where a patch is worn, and with it most of the dualities."""
_IMPORT = re.compile(r"^\s*(?:from dualview\.?([\w.]*) import (\([^)]*\)|.+)|import dualview\.([\w.]+))", re.MULTILINE)
_LIBRARIES = ("torch", "transformers", "numpy", "scipy")
_READ = (".safetensors", ".json", ".txt", ".model", ".py", ".jinja", ".tiktoken")

# Options whose content is in the key by other means, or that say where something is read or kept.
_BY_CONTENT = ("task", "data", "demos", "queries", "patch", "device", "save_records")

HashFile = Callable[[Path], str]


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=100_000, typed=True)
def _fragment(name: str, value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else value
    return f"{name}={json.dumps(plain, ensure_ascii=False)}"


def canonical(options: RunOptions) -> str:
    """Every option as one line of text, the same for equal options."""
    return "\n".join(map(_fragment, *zip(*vars(options).items(), strict=True)))


def asked_id(options: RunOptions) -> str:
    """Names what was asked for, whatever is behind the names."""
    return digest(canonical(options))


def code_version(*, patched: bool = False) -> str:
    """A hash of the source that computes numbers, of the tasks that come with it, and of the libraries under it.

    A control asks another task than the cell's, so those of the library, and the rows behind them, are part of the
    code.
    """
    return _code_version(patched)


@lru_cache
def _code_version(patched: bool) -> str:
    sources = {**computing_sources(patched=patched), **library_sources()}
    parts = [f"{name} {hashlib.sha256(sources[name].encode()).hexdigest()}" for name in sorted(sources)]
    libraries = [f"{name} {_library_version(name).partition('+')[0]}" for name in _LIBRARIES]
    return digest(*parts, f"rows {assets.DATA.pin.sha256}", *libraries)


def _library_version(name: str) -> str:
    """Cells of two unknown versions would share a key, so a sweep refuses one before it computes anything."""
    found = version_of(name)
    if found == UNKNOWN:
        raise UserError(f"The version of {name} is not known, so no cell can be stored under it; install {name} again.")
    return found


def library_sources() -> dict[str, str]:
    """The tasks of the library, as they are written."""
    folder = resources.files("dualview") / "tasks" / "library"
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".yaml")}


def computing_sources(*, patched: bool = False) -> dict[str, str]:
    """Every module that the comparison imports, directly or not, and that decides numbers, with its source."""
    root = resources.files("dualview")
    aside = ASIDE if patched else (*ASIDE, PATCHING)
    found: dict[str, str] = {}
    todo = ["comparison"]
    while todo:
        name = todo.pop()
        if name in found or name.partition(".")[0] in aside:
            continue
        *folders, last = name.split(".")
        place = root.joinpath(*folders)
        file = place / last / "__init__.py" if (place / last).is_dir() else place / f"{last}.py"
        if not file.is_file():  # a name that an import takes out of a module, not a module
            continue
        found[name] = file.read_text(encoding="utf-8")
        for module, names, plain in _IMPORT.findall(found[name]):
            inside = [f"{module}.{name}".strip(".") for name in re.findall(r"\w+", names)]
            todo += [part for part in (module, plain, *inside) if part]
    return found


class Fingerprints:
    """Hashes of what is behind a cell's names, each read once; None where it cannot be known without loading."""

    def __init__(self, hash_file: HashFile = sha256_of, auto: str | None = None) -> None:
        self._read = hash_file
        self._auto = auto
        self._known: dict[tuple[str, ...], str | None] = {}
        self._behind: dict[tuple[Any, ...], str | None] = {}
        self._stamps: dict[Path, str] = {}
        """Every file that was hashed, as it was then."""

    @cached_property
    def auto(self) -> str:
        """The kind of device that `auto` is taken for."""
        return self._auto or auto_kind()

    def unchanged(self) -> bool:
        """Whether every file is still as it was hashed; a model may be saved anew while a sweep runs."""
        try:
            return all(file_stamp(path) == stamp for path, stamp in self._stamps.items())
        except OSError:
            return False

    def _hash_file(self, path: Path) -> str:
        self._stamps[path] = file_stamp(path)
        return self._read(path)

    def plan_key(self, options: RunOptions, asked: str | None = None, *, auto: str | None = None) -> str | None:
        """What a cell is planned by: its options (by their id, `asked`, where it is at hand) and their files.

        `auto` is the kind of device that an automatic one turned out to be, if not what it was taken for.
        """
        device = (auto or self.auto) if options.device == "auto" else "given"
        model = (options.model, options.trust_remote_code)
        named = (model, options.task, options.data, options.demos, options.queries, options.patch, device)
        if named not in self._behind:
            self._behind[named] = self._files_of(options, device)
        behind = self._behind[named]
        return None if behind is None else digest(asked or asked_id(options), behind)

    def _files_of(self, options: RunOptions, device: str) -> str | None:
        """All that is behind a cell's names; many cells share it."""
        name, own_code = options.model, options.trust_remote_code
        parts = [self._once(("model", name, str(own_code)), lambda: self._model_or_none(name, own_code))]
        where = (options.task, str(options.data))
        parts.append(self._once(("task", *where), lambda: self._task(options.task, options.data)))
        for path in (options.demos, options.queries, options.patch):
            if path is not None:
                parts.append(self._once(("file", str(path)), lambda path=path: self._file(path)))
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return digest(*known, device, code_version(patched=options.patch is not None))

    def _once(self, key: tuple[str, ...], make: Callable[[], str | None]) -> str | None:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _file(self, path: Path) -> str:
        try:
            return self._hash_file(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}); check the path.") from error

    def _model_or_none(self, name: str, own_code: bool) -> str | None:
        try:
            found = self._model(name)
            if found is None or not own_code:
                return found
            return digest(found, *self._code(name))
        except (OSError, UserError):  # a model that cannot be read fails its own cells, not the sweep
            return None

    def _model(self, name: str) -> str | None:
        """The files of a model; None where there are none to see, so that loading it must tell."""
        folder = assets.MODEL.folder if name == "embedded" else Path(name).expanduser()
        if folder.is_file():
            return self._hash_file(folder)
        if folder.is_dir():
            files = sorted(path for path in folder.iterdir() if path.suffix in _READ and path.is_file())
            return digest(*(f"{path.name} {self._hash_file(path)}" for path in files))
        hub_name = HubName.parse(name)
        return None if hub_name is None or name == "embedded" else commit_of(hub_name, "model")

    def _code(self, name: str) -> list[str]:
        """The commits of the code that a model takes from other repositories of the hub."""
        folder, hub_name = Path(name).expanduser(), HubName.parse(name)
        if folder.is_dir():
            found = code_commits(folder)
        else:
            found = code_commits(hub_name) if hub_name is not None and name != "embedded" else {}
        return [f"{other} {commit}" for other, commit in found.items()]

    def _task(self, name: str, data: Path | None) -> str | None:
        """A task's definition and the files of its splits."""
        task = load_task(name, data)
        parts = [task.model_dump_json()]
        for split in SPLITS:
            source = task.source(split)
            found = "none" if source is None else self._source(source, Path(name).parent)
            if found is None:
                return None
            parts.append(f"{split} {found}")
        return digest(*parts)

    def _source(self, source: str, folder: Path) -> str | None:
        if source.startswith("embedded:"):
            return assets.DATA.pin.sha256
        if source.startswith("hf:"):
            try:
                return find(hub_addresses(source))[1].commit
            except UserError:  # reading it says what is wrong
                return None
        return self._file(folder / source)


def file_stamp(path: Path) -> str:
    """Changes whenever a file does: its change time cannot be set back."""
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


@dataclass(frozen=True)
class Identity:
    """Everything that decides a cell's numbers, part by part, as its manifest keeps it."""

    model: str
    weights: str
    configuration: str
    dtype: str
    device: str
    """The kind of device: its number, and how many threads it has, decide nothing but rounding and time."""
    attention: str
    prompts: str
    """Every token id, and which candidates are right."""
    tokenizer: str
    """What turns the texts of selection, calibration and controls into tokens."""
    remote_code: str | None
    """The Python files that came with the model."""
    task: str
    settings: dict[str, Any]
    patch: str | None
    code: str

    @property
    def key(self) -> str:
        return digest(json.dumps(asdict(self), sort_keys=True, ensure_ascii=False))


def identify(prepared: Prepared, hash_file: HashFile = sha256_of) -> Identity:
    """The identity of a cell whose model is loaded and whose prompts are made."""
    from dualview.comparison.provenance import attention_path
    from dualview.tasks.prompts import prompts_hash

    options, lm, prompts = prepared.options, prepared.lm, prepared.prompts
    golds = " ".join(str(query.gold) for query in prompts.queries)
    return Identity(
        model=options.model,
        weights=lm.weights_hash,
        configuration=_configuration(lm),
        dtype=str(lm.dtype).removeprefix("torch."),
        device=lm.device.type,
        attention=attention_path(lm),
        prompts=digest(prompts_hash(prompts), golds),
        tokenizer=prepared.cache("tokenizer", (lm.tokenizer,), lambda: tokenizer_hash(lm.tokenizer)),
        remote_code=remote_code_hash(lm),
        task=prepared.cache("task rows", (prepared.task,), lambda: _rows(prepared.task)),
        settings={name: _plain(value) for name, value in vars(options).items() if name not in _BY_CONTENT},
        patch=None if options.patch is None else hash_file(options.patch),
        code=code_version(patched=options.patch is not None),
    )


def _configuration(lm: LanguageModel) -> str:
    """The model's configuration, less what only says where it came from and how it was loaded."""
    stated = lm.model.config.to_dict()
    kept = {
        name: value for name, value in stated.items() if not name.startswith("_") and name != "transformers_version"
    }
    return digest(json.dumps(kept, sort_keys=True, default=str))


def _rows(task: Task) -> str:
    """The task as it chooses: its definition and every row of every split."""
    rows = {split: [_row(row) for row in _split(task, split)] for split in SPLITS}
    return digest(task.model_dump_json(exclude={*SPLITS, "citation", "licence", "notes"}), json.dumps(rows))


def _row(row: Any) -> list[Any]:
    return [dict(row.fields), row.label, row.choices]


def _split(task: Task, split: Any) -> list[Any]:
    try:
        return task.rows(split)
    except UserError:  # a task of a few rows has none for selection; whether that matters is the run's to say
        return []


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
