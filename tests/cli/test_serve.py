"""`dualview serve` as a person starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from typer.testing import CliRunner

from dualview.cli import serve as commands
from dualview.io.errors import UserError
from dualview.web import serve

TOKEN = "0123456789abcdef"


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(commands.serve)
    made.command("other")(lambda: None)  # with one verb alone, typer would leave its name out
    return made


def call(app: typer.Typer, *arguments: object) -> Any:
    return CliRunner().invoke(app, ["serve", *map(str, arguments), "--no-browser"])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything but the serving itself."""
    seen: dict[str, Any] = {"opened": []}

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        seen["config"], seen["bound"] = self.config, sockets[0].getsockname()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr("webbrowser.open", seen["opened"].append)
    return seen


def test_it_binds_the_loopback_and_says_where(app: typer.Typer, started: dict[str, Any]) -> None:
    result = call(app, "--port", 0)
    assert result.exit_code == 0 and started["bound"][0] == "127.0.0.1"
    assert f"http://127.0.0.1:{started['bound'][1]}/" in result.output
    assert started["opened"] == [] and started["config"].access_log is False


def test_the_browser_is_opened_with_the_token(started: dict[str, Any]) -> None:
    serve.serve(port=0, token=f"{TOKEN}+/")
    assert started["opened"] == [f"http://127.0.0.1:{started['bound'][1]}/?token={TOKEN}%2B%2F"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost"])
def test_another_address_is_refused_without_a_token(app: typer.Typer, started: dict[str, Any], host: str) -> None:
    result = call(app, "--host", host, "--port", 0)
    assert isinstance(result.exception, UserError) and "--token" in str(result.exception)
    assert "bound" not in started


def test_another_address_with_a_token(app: typer.Typer, started: dict[str, Any]) -> None:
    assert call(app, "--host", "0.0.0.0", "--port", 0, "--token", TOKEN).exit_code == 0
    assert started["bound"][0] == "0.0.0.0"


def test_the_token_may_come_from_the_environment(
    app: typer.Typer, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALVIEW_TOKEN", TOKEN)
    assert f"token={TOKEN}" in call(app, "--port", 0).output


def test_mistakes(app: typer.Typer, started: dict[str, Any], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = call(app, "--port", taken.getsockname()[1])
    assert isinstance(result.exception, UserError) and "Cannot listen" in str(result.exception)
    for arguments, said in (
        (("--port", 99999), "--port"),
        (("--data", tmp_path / "none"), "not a folder"),
        (("--token", "short"), "--token"),
        (("--dtype", "float8"), "dtype"),
        (("--device", "foo"), "'foo' cannot be used here"),
        (("--model", "/nope"), "There is no model folder /nope"),
        (("--model", tmp_path), "config.json"),
        (("--model", "nope.gguf"), "There is no GGUF file nope.gguf"),
        (("--model", "embedded", "--model", " "), "--model is empty"),
        (("--store", tmp_path), "is not a store"),
        (("--store", tmp_path / "none"), "is not a store"),
        (("--allow-host", "http://x y"), "--allow-host 'http://x y'"),
        (("--allow-host", "box.example/"), "--allow-host"),
    ):
        result = call(app, *arguments)
        assert isinstance(result.exception, UserError) and said in str(result.exception)
    assert "bound" not in started


def test_a_hub_s_model_and_hosts_are_taken_as_they_are(app: typer.Typer, started: dict[str, Any]) -> None:
    hosts = [part for host in ("box.example:8765", "[::1]:80", "10.0.0.1", "box") for part in ("--allow-host", host)]
    assert call(app, "--port", 0, "--model", "gpt2", "--model", "org/name", *hosts).exit_code == 0
    assert "bound" in started


def test_help_is_light() -> None:
    script = (
        "import sys, typer\nfrom typer.testing import CliRunner\nfrom dualview.cli import serve as commands\n"
        "app = typer.Typer(); app.command()(commands.serve)\nresult = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and '--no-browser' in result.output, result.output\n"
        "heavy = {'torch', 'starlette', 'uvicorn', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_it_starts_answers_and_stops(model: Path) -> None:
    arguments = ["serve", "--port", "0", "--no-browser", "--model", str(model)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dualview", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"dualview explorer" in page.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert "Traceback" not in errors and process.returncode == 0
    finally:
        process.kill()
        process.wait()
