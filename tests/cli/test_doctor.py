"""`dualview doctor`, and the Dockerfile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import dualview
from dualview.io import doctor as module

ROOT = Path(__file__).parents[2]


def ran(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", "dualview", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_what_the_command_prints() -> None:
    done = ran("--json", "-")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["healthy"] and done.stderr == ""
    assert found["versions"]["dualview"] == dualview.__version__ and found["device"]["auto"] in ("cpu", "cuda")
    assert all(each["command"].startswith(("pip install", "dualview ")) for each in found["missing"])


def test_an_empty_cache(tmp_path: Path) -> None:
    done = ran(DUALVIEW_CACHE=str(tmp_path / "nothing" / "yet"))
    assert done.returncode == 0 and "dualview assets fetch" in done.stdout and not (tmp_path / "nothing").exists()


def test_larger_models_are_no_part_of_the_embedded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the default run needs decides whether it works offline."""
    names = [each.name for each in module.list_assets()]

    def only_missing(start: str) -> None:
        states = [SimpleNamespace(name=n, state="missing" if n.startswith(start) else "ready") for n in names]
        monkeypatch.setattr(module, "list_assets", lambda: states)

    only_missing("qwen")
    found = dualview.doctor()
    assert found.offline["the embedded model and tasks"]
    assert [each.command for each in found.missing if "assets" in each.command] == [
        f"dualview assets fetch {name}" for name in names if name.startswith("qwen")
    ]
    only_missing("vader")
    found = dualview.doctor()
    assert not found.offline["the embedded model and tasks"]
    assert [each.command for each in found.missing if "assets" in each.command] == ["dualview assets fetch"]


def test_a_missing_extra_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "xarray" else object())
    (missing,) = [each for each in dualview.doctor().missing if each.what.startswith("extra")]
    assert missing.command == "pip install 'dualview[xarray]'" and not missing.required


def test_a_missing_or_old_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "requires", lambda _: ["numpy>=999", "no-such-package>=1", 'ray>=2; extra == "ray"'])
    found = dualview.doctor()
    required = [each for each in found.missing if each.required]
    assert [each.command for each in required] == ["pip install 'numpy>=999'", "pip install 'no-such-package>=1'"]
    assert not found.healthy


def test_it_runs_where_packages_are_missing() -> None:
    """It must start where the others cannot, and say what is not there."""
    code = (
        "import importlib.metadata as metadata, sys\n"
        "gone = ('numpy', 'scipy', 'torch', 'pandas', 'yaml')\n"
        "sys.modules.update(dict.fromkeys(gone))\n"
        "known = metadata.version\n"
        "def version(name):\n"
        "    if name in gone:\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "metadata.version = version\n"
        "metadata.requires = lambda _: ['numpy>=1.26', 'scipy>=1.12', 'rich>=13']\n"
        "sys.argv = ['dualview', 'doctor']\n"
        "from dualview.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == ""
    shown = " ".join(done.stdout.split())
    assert "pip install 'numpy>=1.26'" in shown and "pip install 'scipy>=1.12'" in shown and "'rich" not in shown


def test_every_extra_is_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() - {"bench", "docs", "dev"} <= module.EXTRAS.keys()


def test_the_dockerfile() -> None:
    """Linted, of files that exist, and with no process of root; `.ci/image` carries out its commands."""
    text = (ROOT / "Dockerfile").read_text()
    lint = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (lint.returncode, lint.stdout) == (0, "")
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!root|0$)\w+$.*^ENTRYPOINT", last, re.DOTALL | re.MULTILINE) and "sudo" not in text
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
        ignored = (ROOT / ".dockerignore").read_text().split()
        assert all(f"!{source}" in ignored for source in sources.split())
