"""Every code block of README and docs runs, or says why it cannot and is parsed instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from docs.blocks import PAGES, ROOT, Block, blocks_of, check_command, run_block
from dualview.io.errors import UserError

WITH_CODE = [page for page in PAGES if any(b.language in ("", "bash", "python") for b in blocks_of(page))]
NEEDS = {"a GPU", "a cluster", "a model hub", "the network", "a container engine", "minutes", "files of your own"}


@pytest.mark.embedded
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks_of(page):
        run_block(block, tmp_path, namespace)


def test_blocks_that_are_not_run_say_why() -> None:
    """With one of a few reasons; `-s` prints the list."""
    for block in (block for page in PAGES for block in blocks_of(page) if "needs" in block.options):
        print(f"{block}: needs {block.options['needs']}")
        assert block.options["needs"] in NEEDS, f"{block}: {block.options['needs']!r} is no known reason"


@pytest.mark.parametrize(
    "command",
    [
        "dualview runn",
        "dualview run --shotz 3",
        "srun dualview run --controls all",
        "dualview run --shots few",
        "dualview metrics",
        "true && dualview tasks | dualview verify --fast",
        "make nothing",
    ],
)
def test_wrong_commands_are_noticed(command: str) -> None:
    with pytest.raises((AssertionError, UserError, typer.TyperException)):
        check_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "CUDA_VISIBLE_DEVICES=1 dualview run --shots 3 --seed $SEED | tee log",
        "make run && dualview tasks  # and more",
        "srun dualview assets list",
    ],
)
def test_right_commands_pass(command: str) -> None:
    check_command(command)


def test_blocks_are_run_as_they_say(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}

    def block(language: str, text: str, **options: str) -> Block:
        return Block(ROOT / "README.md", 1, language, options, text)

    run_block(block("yaml", "a: 1\n", title="folder/a.yaml"), tmp_path, namespace)
    run_block(block("bash", "grep -q 'a: 1' folder/a.yaml\nmkdir \\\n  made\n"), tmp_path, namespace)
    run_block(block("python", "x = 2\n"), tmp_path, namespace)
    run_block(block("python", "raise SystemExit\n", needs="a GPU"), tmp_path, namespace)
    assert namespace["x"] == 2 and (tmp_path / "made").is_dir()
    with pytest.raises(AssertionError, match="ended with 1"):
        run_block(block("bash", "false\n"), tmp_path, namespace)
    with pytest.raises(AssertionError, match="what is a"):
        run_block(block("fortran", "end\n"), tmp_path, namespace)
