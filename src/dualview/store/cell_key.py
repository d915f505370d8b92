"""The keys of a cell: one from everything that decides its numbers, and a cheaper one to plan with.

The *cell key* needs the loaded model and the prompts: the model's name, weights and configuration, dtype, kind of
device, attention path, every token id, the tokenizer, the task's rows, the settings, the Python files that come with
the model, and the versions of the numerics (`comparison.numerics`) and of the libraries below them. Output paths and
the number of threads are not part of it.

The *plan key* needs only the options and hashes of the files they name. The store remembers which plan key led to
which cell key, so ten thousand finished cells are recognised without loading a model. A changed file changes the plan
key, and so does a machine where `--device auto` means another device; the cell key then says whether it matters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dualview.comparison.numerics import NUMERICS_VERSION
from dualview.io import assets, hub
from dualview.io.errors import UserError
from dualview.io.hashing import digest, file_stamp, sha256_of
from dualview.io.hub import HubName, Kind
from dualview.io.versions import UNKNOWN, version_of
from dualview.models.hub import code_commits
from dualview.options import Labels, RunOptions, keyed, plain
from dualview.store.fingerprint import remote_code_hash, tokenizer_hash
from dualview.tasks.hub import find, hub_addresses
from dualview.tasks.sources import read_source
from dualview.tasks.task import SPLITS, Task, list_tasks, load_task

if TYPE_CHECKING:
    from dualview.comparison.prepare import Prepared
    from dualview.models.language_model import LanguageModel

_LIBRARIES = ("torch", "transformers", "numpy", "scipy")
_MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".py", ".jinja", ".tiktoken")
_ABOUT_TASK = {"citation", "licence", "notes"}

# Options that enter the key by content, or that only name where something is read or written.
_BY_CONTENT = ("task", "data", "demos", "queries", "patch", "adapter", "device", "save_records")

CONTENT_OPTIONS = (
    "protocol",  # it decides the defaults of the others
    *("model", "trust_remote_code", "task", "data", "demos", "queries", "patch", "device", "controls"),
    *("labels", "adapter"),
)
"""The options on which `Fingerprints.content` depends."""

HashFile = Callable[[Path], str]


@lru_cache(maxsize=100_000, typed=True)
def fragment(name: str, value: Any) -> str:
    """One option as text."""
    return f"{name}={json.dumps(plain(value), ensure_ascii=False)}"


def canonical(options: RunOptions | Mapping[str, Any]) -> str:
    """Every option that enters a key (also as a manifest states them) as one line of text, the same for equal ones."""
    named = options if isinstance(options, Mapping) else vars(options)
    hashable = {name: _hashable(value) for name, value in named.items()}
    return "\n".join(fragment(name, value) for name, value in keyed(hashable).items())


def _hashable(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def asked_id(options: RunOptions | Mapping[str, Any]) -> str:
    """A hash of the options, not of the files they name."""
    return digest(canonical(options))


OPTIONS_VERSION = int(digest(*(field.name for field in fields(RunOptions)))[:7], 16)
"""Changes when an option is added: the ids of stored options are then made again."""


@lru_cache
def _defaults(protocol: str) -> Mapping[str, Any]:
    return vars(RunOptions.make(protocol=protocol))


def asked_now(options: Mapping[str, Any], before: str) -> str:
    """The id of options that an earlier dualview stored, with the defaults of what was added since.

    It stays what it was `before` if an option is gone.
    """
    try:
        defaults = _defaults(str(options.get("protocol", "modern")))
    except UserError:
        return before
    return (
        before
        if options.keys() - defaults.keys()
        else asked_id({name: options.get(name, defaults[name]) for name in defaults})
    )


@lru_cache
def code_version() -> str:
    """What computes the numbers: `NUMERICS_VERSION` and the libraries' versions, without builds such as +cpu."""
    libraries = [f"{name} {_library_version(name).partition('+')[0]}" for name in _LIBRARIES]
    return ", ".join([f"numerics {NUMERICS_VERSION}", *libraries])


def _library_version(name: str) -> str:
    """Two unknown versions would share a key, so a sweep refuses one before it computes anything."""
    found = version_of(name)
    if found == UNKNOWN:
        raise UserError(f"The version of {name} is not known, so no cell can be stored under it; install {name} again.")
    return found


def library_hash(options: RunOptions) -> str | None:
    """sha256 of the library's tasks and rows, where a cell's full controls use demonstrations of another task."""
    return _library_hash(options.labels) if options.controls == "full" else None


@lru_cache
def _library_hash(labels: Labels) -> str:
    tasks = [task.relabelled(labels) if task.labels else task for task in list_tasks()]
    return digest(*(task.model_dump_json(exclude=_ABOUT_TASK) for task in tasks), assets.DATA.sha256)


class Fingerprints:
    """Hashes of the models, tasks and files that options name, each read once."""

    def __init__(self, hash_file: HashFile = sha256_of, auto: str | None = None) -> None:
        self._read, self._auto = hash_file, auto
        self._stamps: dict[Path, str] = {}
        """The stamp of every hashed file, from before it was read."""
        self._model_hash, self._task_hash, self._file_hash = cache(self._model), cache(self._task), cache(self._file)
        self._contents: dict[tuple[Any, ...], str | None] = {}

    @cached_property
    def auto(self) -> str:
        """The kind of device that `auto` means."""
        return self._auto or auto_kind()

    def unchanged(self) -> bool:
        """Whether no file has changed since it was hashed; a model may be saved again while a sweep runs."""
        try:
            return all(file_stamp(path) == stamp for path, stamp in self._stamps.items())
        except OSError:
            return False

    def plan_key(self, options: RunOptions, asked: str | None = None, *, auto: str | None = None) -> str | None:
        """The plan key: a hash of the options and their files; None where only loading can tell.

        `asked` is the options' id, if known; `auto` the kind of device that `auto` meant, if not this machine's.
        """
        content = self.content(options, auto=auto)
        return None if content is None else digest(asked or asked_id(options), content)

    def content(self, options: RunOptions, *, auto: str | None = None) -> str | None:
        """A hash of everything that `CONTENT_OPTIONS` name; None where only loading can tell."""
        device = (auto or self.auto) if options.device == "auto" else "given"
        model, task = (options.model, options.trust_remote_code), (options.task, options.data, options.labels)
        files = (options.demos, options.queries, options.patch, *adapter_files(options))
        named = (model, task, files, device, library_hash(options))
        if named not in self._contents:  # many cells share it
            parts = [self._model_hash(*model), self._task_hash(*task)]
            parts += [self._file_hash(path) for path in files if path is not None]
            known = [part for part in parts if part is not None]
            rest = (device, str(library_hash(options)), code_version())
            self._contents[named] = digest(*known, *rest) if len(known) == len(parts) else None
        return self._contents[named]

    def _hash_file(self, path: Path) -> str:
        self._stamps[path] = file_stamp(path)
        return self._read(path)

    def _file(self, path: Path) -> str:
        try:
            return self._hash_file(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}); check the path.") from error

    def _model(self, name: str, own_code: bool) -> str | None:
        try:
            found = self._model_files(name)
            return found if found is None or not own_code else digest(found, *self._code(name))
        except (OSError, UserError):  # an unreadable model fails its own cells, not the sweep
            return None

    def _model_files(self, name: str) -> str | None:
        """The files of a model; None where only loading can tell."""
        folder = assets.MODEL.folder if name == "embedded" else assets.named_model(name) or Path(name).expanduser()
        if folder.is_file():
            return self._hash_file(folder)
        if folder.is_dir():
            files = sorted(path for path in folder.iterdir() if path.suffix in _MODEL_FILES and path.is_file())
            return digest(*(f"{path.name} {self._hash_file(path)}" for path in files))
        hub_name = HubName.parse(name)
        return None if hub_name is None or name == "embedded" else commit_of(hub_name, "model")

    def _code(self, name: str) -> list[str]:
        """The commits of the code that a model takes from other hub repositories."""
        folder, hub_name = Path(name).expanduser(), HubName.parse(name)
        if folder.is_dir():
            found = code_commits(folder)
        else:
            found = code_commits(hub_name) if hub_name is not None and name != "embedded" else {}
        return [f"{other} {commit}" for other, commit in found.items()]

    def _task(self, name: str, data: Path | None, labels: Labels) -> str | None:
        """A task's definition and the files of its splits."""
        task = load_task(name, data, labels)
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
            return assets.DATA.sha256
        if source.startswith("hf:"):
            try:
                return find(hub_addresses(source))[1].commit
            except UserError:  # loading it says what is wrong
                return None
        if source.startswith("lm-eval:"):
            try:
                return digest(*(f"{row.where} {row.values}" for row in read_source(source, folder)))
            except UserError:
                return None
        return self._file_hash(folder / source)


def commit_of(name: HubName, kind: Kind) -> str | None:
    """The commit that loading a hub name would read: the hub's, or the cached one; None where neither is known."""
    try:
        return hub.resolve(name, kind).commit
    except UserError:  # no network, no such name, no permission: loading says which
        return None


_GPU_DEVICES = tuple(Path("/dev") / name for name in ("nvidiactl", "nvmap", "dxg", "kfd"))
"""Without one of these neither CUDA (also under WSL or on a Jetson) nor ROCm finds a GPU on Linux."""


def auto_kind() -> str:
    """The kind of device that `--device auto` means here, `cuda` or `cpu`; without torch where there can be no GPU."""
    if "torch" not in sys.modules:
        no_gpu = sys.platform == "linux" and not any(device.exists() for device in _GPU_DEVICES)
        if no_gpu or sys.platform == "darwin":
            return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class CellIdentity:
    """Everything that decides a cell's numbers, as its manifest keeps it."""

    model: str
    weights: str
    configuration: str
    dtype: str
    device: str
    """The kind of device: its number and its threads decide only rounding and time."""
    attention: str
    prompts: str
    """Every token id, and which candidates are right."""
    tokenizer: str
    """It turns the texts of selection, calibration and controls into tokens."""
    remote_code: str | None
    """The Python files that came with the model."""
    task: str
    settings: dict[str, Any]
    patch: str | None
    library: str | None
    """The library's tasks, where a control uses one of them."""
    code: str
    adapters: tuple[str, ...] = ()
    """The files of each adapter; no part of the key where there are none."""

    @property
    def key(self) -> str:
        known = {name: value for name, value in asdict(self).items() if name != "adapters" or value}
        return digest(json.dumps(known, sort_keys=True, ensure_ascii=False))


def identify(prepared: Prepared, hash_file: HashFile = sha256_of) -> CellIdentity:
    """The identity of a cell, from its loaded model and its prompts."""
    from dualview.comparison.provenance import attention_path
    from dualview.tasks.prompts import prompts_hash

    options, lm, prompts = prepared.options, prepared.lm, prepared.prompts
    golds = " ".join(str(query.gold) for query in prompts.queries)
    return CellIdentity(
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
        settings={name: plain(value) for name, value in keyed(vars(options)).items() if name not in _BY_CONTENT},
        patch=None if options.patch is None else hash_file(options.patch),
        library=library_hash(options),
        code=code_version(),
        adapters=tuple(map(hash_file, adapter_files(options))),
    )


def adapter_files(options: RunOptions) -> list[Path]:
    """The files that decide what adapters and their twins do."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    own = [folder / name for folder in options.adapter for name in names]
    twins = [folder / "flipped_labels" / name for folder in options.adapter for name in names]
    return [*own, *(path for path in twins if path.exists())]


def _configuration(lm: LanguageModel) -> str:
    """The model's configuration, without what only says where it came from and how it was loaded."""
    stated = lm.model.config.to_dict()
    kept = {
        name: value for name, value in stated.items() if not name.startswith("_") and name != "transformers_version"
    }
    return digest(json.dumps(kept, sort_keys=True, default=str))


def _rows(task: Task) -> str:
    """A task's definition and every row of every split."""
    rows = {split: [[dict(row.fields), row.label, row.choices] for row in _split(task, split)] for split in SPLITS}
    return digest(task.model_dump_json(exclude={*SPLITS, *_ABOUT_TASK}), json.dumps(rows))


def _split(task: Task, split: Any) -> list[Any]:
    try:
        return task.rows(split)
    except UserError:  # a small task has no rows for selection; the run says so if it needs them
        return []
