"""The fenced blocks of a Markdown page, and how each is run.

A page's blocks run in order, in a folder of their own:

    ```python           executed, all of a page in one namespace
    ```bash             `dualview …` lines through the command line's own app in this process, other lines by bash
    ```yaml title="f"   written to the file f, as the page tells its reader to do (any language)
    ```bash needs="…"   not run, for the reason given: its `dualview` and `make` lines are parsed by the real program
    ```                 shown; a `dualview` line in it is parsed by the real program
    ```text, ```json    shown

`dualview lab` trains for minutes and `dualview serve` never ends, so their lines are parsed and not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from dualview.cli.lab import lab_app
from dualview.cli.main import app
from dualview.options import RunOptions

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SHOWN = {"text", "json", "yaml", "bibtex"}
PARSED_ONLY = {"lab", "serve"}

_FENCE = re.compile(r"^(```+)([\w-]*)[ \t]*(.*?)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """Of its first line of content."""
    language: str
    options: dict[str, str]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        _, language, options, content = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, language, dict(_OPTION.findall(options)), content))
    return found


def commands(block: Block) -> Iterator[str]:
    """The lines of a shell block, continued lines joined, comments and blank lines left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield line.strip()


def run_block(block: Block, folder: Path, namespace: dict[str, Any]) -> None:
    """Run one block as the module's docstring says."""
    if "title" in block.options:
        path = folder / block.options["title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    if "needs" in block.options:
        check_block(block)
    elif block.language == "python":
        # Blank lines before it, so that a traceback names the line of the page.
        source = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        exec(source, namespace)
    elif block.language == "bash":
        for command in commands(block):
            run_command(command, folder)
    elif block.language == "":
        for command in commands(block):
            check_command(command)
    elif block.language not in SHOWN:
        raise AssertionError(f"{block}: what is a {block.language!r} block? See tests/docs/blocks.py.")


def run_command(command: str, folder: Path) -> None:
    """Run one line of a shell block."""
    words = shlex.split(command, comments=True)
    if words[0] == "dualview":
        parse(words[1:])
        if words[1] not in PARSED_ONLY:
            result = CliRunner().invoke(app, words[1:])
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            assert result.exit_code == 0, f"`{command}` ended with {result.exit_code}:\n{result.output}"
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"`{command}` ended with {done.returncode}:\n{done.stdout}{done.stderr}"


def check_block(block: Block) -> None:
    """What can be checked of a block that cannot be run here."""
    assert block.options["needs"].strip(), f"{block}: say what it needs"
    if block.language == "python":
        compile(block.text, str(block.page), "exec")
    elif block.language == "bash":
        for command in commands(block):
            check_command(command)


def check_command(command: str) -> None:
    """Parse every call of `dualview`, and find every target of `make`, in one line of shell."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    part: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            _check_call(part)
            part = []
        else:
            part.append(word)


def _check_call(words: list[str]) -> None:
    if words[:1] == ["docker"]:  # the verb comes after the image's name, if there is one
        words = words[words.index("dualview") :] if words[1] == "run" and "dualview" in words else []
    if "dualview" in words:
        parse(words[words.index("dualview") + 1 :])
    elif words[:1] == ["make"]:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"the Makefile has no target {words[1:]}"


def parse(arguments: list[str]) -> None:
    """Parse a command line as the program would: verb, options and values must exist. A shell's $VARIABLES are 1."""
    command: Any = typer.main.get_command(app)
    arguments = [re.sub(r"\$\{?\w+\}?", "1", word) for word in arguments]
    verb = arguments[0] if arguments else ""
    while hasattr(command, "commands"):
        name, *arguments = arguments or [""]
        assert name in command.commands, f"dualview has no verb {name!r}"
        command = command.commands[name]
    if verb == "lab":  # whose commands read their options themselves
        command = typer.main.get_command(lab_app(command.name))
    parsed = command.make_context(command.name, list(arguments)).params
    known = {field.name for field in fields(RunOptions)}
    if known <= set(parsed):
        RunOptions.make(**{name: value for name, value in parsed.items() if name in known})
