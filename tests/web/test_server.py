"""The real server on a real port: what it answers, what it refuses, and that it goes on afterwards."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dualview.web import app
from dualview.web.jobs import Cancelled
from dualview.web.model_cache import ModelCache
from dualview.web.state import LIMITS, DrawQuery
from web.live import cache_of, document, row, serving

JSON = {"content-type": "application/json"}


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]


def ask(address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
    """One request over a connection of its own; nothing is tidied up on the way."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    try:
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.putrequest(method, path, skip_host=bool(headers and "host" in headers))
        given = {**(JSON if method == "POST" else {}), **(headers or {})}
        if sent is not None and "transfer-encoding" not in given:
            given = {"content-length": str(len(sent)), **given}
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            if sent is not None:
                connection.send(sent)
        except (BrokenPipeError, ConnectionResetError):  # refused before it was all sent
            pass
        return Reply(connection.getresponse())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def address(model: Path) -> Generator[str]:
    with serving(cache_of(model)) as found:
        yield found


@pytest.fixture(autouse=True)
def still_there(address: str) -> Generator[None]:
    """Whatever a test did to the server, it answers afterwards."""
    yield
    assert ask(address, "GET", "/api/about").status == 200


def test_the_page_and_its_files(address: str) -> None:
    page = ask(address, "GET", "/")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    assert "<script>" not in text and "style=" not in text and " onclick" not in text
    assert "http://" not in text and "https://" not in text
    for name, kind in (("main.js", "text/javascript"), ("charts.js", "text/javascript"), ("dualview.css", "text/css")):
        file = ask(address, "GET", f"/static/{name}")
        assert file.status == 200 and file.headers["content-type"].startswith(kind)
        assert file.headers["x-content-type-options"] == "nosniff"
    assert "server" not in page.headers


def test_what_it_says_of_itself(address: str, model: Path) -> None:
    about = ask(address, "GET", "/api/about").json
    assert about["models"] == [str(model)] and about["limits"] == LIMITS and about["store"] is False
    names = {task["name"] for task in about["tasks"]}
    assert {"movie", "tweet", "product", "source", "sst2", "sst5", "mr", "subj", "agnews", "cb"} <= names
    assert ask(address, "GET", "/store").status == 404


def test_a_model_loads_and_tells_its_facts(address: str, model: Path) -> None:
    loaded = ask(address, "POST", "/api/load", {"model": str(model)}).events
    assert loaded[0]["event"] == "queued" and loaded[-1]["event"] == "loaded"
    assert loaded[-1]["layers"] == 3 and loaded[-1]["heads"] == 4 and loaded[-1]["dtype"] == "float64"


def test_an_answer_streams(address: str, model: Path) -> None:
    reply = ask(address, "POST", "/api/answer", document(model))
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    kinds = [event["event"] for event in reply.events if event["event"] != "part"]
    assert kinds == [
        "queued",
        "prompt",
        "setting",
        "setting",
        "step",
        "step",
        "setting",
        "similarity",
        "attention",
        "done",
    ]


def test_drawing(address: str) -> None:
    missing = ask(address, "POST", "/api/draw", {"task": "nope"})
    assert missing.status == 400 and "no task" in missing.json["error"]
    for path in ("../../etc/passwd", "/etc/passwd", "tiny.yaml"):
        assert ask(address, "POST", "/api/draw", {"task": path}).status == 400
    offline = ask(address, "POST", "/api/draw", {"task": "sst2", "shots": 2})
    assert offline.status == 400 and offline.json["error"].endswith(".")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {"host": "evil.example"}, 403),
        ("GET", "/", {"host": "evil.example:80"}, 403),
        ("POST", "/api/answer", {"origin": "http://evil.example"}, 403),
        ("POST", "/api/answer", {"origin": "null"}, 403),
        ("POST", "/api/draw", {"sec-fetch-site": "cross-site"}, 403),
        ("POST", "/api/load", {"sec-fetch-site": "same-site"}, 403),
        ("POST", "/api/answer", {"content-type": "text/plain"}, 415),
        ("GET", "/api/answer", {}, 405),
        ("POST", "/", {}, 405),
        ("DELETE", "/api/about", {}, 405),
        ("OPTIONS", "/api/answer", {"origin": "http://evil.example", "access-control-request-method": "POST"}, 403),
    ],
)
def test_the_policy_holds_on_the_wire(
    address: str, model: Path, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    reply = ask(address, method, path, document(model) if method == "POST" else None, headers)
    assert reply.status == status
    assert "access-control-allow-origin" not in reply.headers
    assert reply.json["error"].endswith(".")
    assert "default-src 'none'" in reply.headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/%2e%2e%2f%2e%2e%2fcli.py",
        "/static//etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "/static/",
        "/static/..",
        "/static/main.js%00.css",
        "/static/main.js/../../app.py",
        "/app.py",
        "/api/store",
        "/static/" + "x" * 5000,
        "/%ff%fe",
    ],
)
def test_no_path_leads_outside(address: str, path: str) -> None:
    reply = ask(address, "GET", path)
    assert reply.status == 404 and reply.json["error"].startswith("There is nothing at")
    assert b"import" not in reply.body and b"root:" not in reply.body


def test_huge_bodies(address: str) -> None:
    assert ask(address, "POST", "/api/answer", b"x" * 300_000).status == 413
    lied = ask(address, "POST", "/api/answer", b"{}", {"content-length": "99999999999"})
    assert lied.status == 413
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    chunked = ask(address, "POST", "/api/answer", chunk * 20 + b"0\r\n\r\n", {"transfer-encoding": "chunked"})
    assert chunked.status == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 50_000, b'{"model": "x"}'])
def test_nonsense_bodies(address: str, body: bytes) -> None:
    reply = ask(address, "POST", "/api/answer", body)
    assert reply.status == 400 and reply.json["error"].endswith(".")


def test_nonsense_on_the_wire(address: str) -> None:
    host, port = urlsplit(address).netloc.split(":")
    for raw in (
        b"\0" * 2000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /api/answer HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"A" * 100_000,
    ):
        with socket.create_connection((host, int(port)), timeout=10) as wire:
            try:
                wire.sendall(raw)
                wire.settimeout(2)
                assert b"200 OK" not in wire.recv(4000)
            except (TimeoutError, ConnectionError):
                pass


def test_markup_stays_text(address: str, model: Path) -> None:
    evil = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
    given = document(
        model, demos=[row(evil, 1), row("dull", 0)], query=row(evil, 0), labels=["Negative", f"Positive {evil}"]
    )
    reply = ask(address, "POST", "/api/answer", given)
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    assert reply.headers["x-content-type-options"] == "nosniff"
    prompt = next(event for event in reply.events if event["event"] == "prompt")
    assert prompt["candidates"][1] == f"Positive {evil}"
    assert reply.events[-1]["event"] == "done"
    wrong = ask(address, "POST", "/api/answer", {**given, "model": evil})
    assert wrong.status == 400 and wrong.headers["content-type"] == "application/json" and evil in wrong.json["error"]


def test_only_its_own_models(address: str) -> None:
    for name in ("embedded", "gpt2", "/etc", "../.."):
        for path, body in (("/api/answer", document(name)), ("/api/load", {"model": name})):
            reply = ask(address, "POST", path, body)
            assert reply.status == 400 and "not one this server was started with" in reply.json["error"]


def test_fifty_at_once(address: str, model: Path) -> None:
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda n: ask(address, "POST", "/api/answer", document(model, lr=n / 1000)), range(50)))
    served = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status != 200]
    assert len(served) >= 9 and all(reply.events[-1]["event"] == "done" for reply in served)
    for reply in refused:
        assert reply.status == 503 and "busy" in reply.json["error"] and reply.headers["retry-after"] == "5"
    again = ask(address, "POST", "/api/answer", document(model))
    assert again.events[-1]["event"] == "done"


def test_the_page_answers_while_it_computes_and_leaving_cancels(
    address: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    def slow(state: Any, model_cache: Any, emit: Any) -> None:
        try:
            while True:
                emit({"event": "part", "part": "slow", "done": 0, "total": 1})
                began.set()
                time.sleep(0.02)
        except Cancelled:
            ended.set()
            raise

    monkeypatch.setattr(app, "answer", slow)
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request("POST", "/api/answer", json.dumps(document(model)), JSON)
    assert connection.getresponse().readline() and began.wait(10)
    start = time.monotonic()
    assert ask(address, "GET", "/api/about").status == 200
    assert ask(address, "POST", "/api/draw", {"task": "nope"}).status == 400  # rows are read beside the computing
    assert time.monotonic() - start < 5
    # One that waits, and leaves while it does, must not keep its place either.
    waiting = [http.client.HTTPConnection(urlsplit(address).netloc, timeout=30) for _ in range(8)]
    for each in waiting:
        each.request("POST", "/api/answer", json.dumps(document(model)), JSON)
        assert b"queued" in each.getresponse().readline()
    assert ask(address, "POST", "/api/answer", document(model)).status == 503
    for each in (*waiting, connection):
        each.close()
    assert ended.wait(10)
    monkeypatch.undo()
    deadline = time.monotonic() + 20
    while (reply := ask(address, "POST", "/api/answer", document(model))).status == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert reply.events[-1]["event"] == "done"


def test_a_failure_is_a_sentence(address: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(state: Any, model_cache: Any, emit: Any) -> None:
        raise RuntimeError("with a secret in it")

    monkeypatch.setattr(app, "answer", broken)
    reply = ask(address, "POST", "/api/answer", document(model))
    assert reply.events[-1]["event"] == "error" and b"secret" not in reply.body


def test_with_a_token(model: Path) -> None:
    token = "0123456789abcdef"
    with serving(cache_of(model), token=token) as address:
        for path in ("/", "/static/main.js", "/api/about"):
            assert ask(address, "GET", path).status == 401
        assert ask(address, "POST", "/api/load", {"model": str(model)}).status == 401
        welcome = ask(address, "GET", f"/?token={token}")
        assert welcome.status == 303
        cookie = {"cookie": welcome.headers["set-cookie"].split(";")[0]}
        assert ask(address, "GET", "/", headers=cookie).status == 200
        loaded = ask(address, "POST", "/api/load", {"model": str(model)}, cookie)
        assert loaded.events[-1]["event"] == "loaded"
        assert ask(address, "POST", "/api/load", {"model": str(model)}, {**cookie, "origin": "http://x"}).status == 403


def test_the_hub_does_not_hold_up_other_draws_and_a_draw_that_was_left_is_cancelled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, drawn = threading.Event(), threading.Event(), list[str]()

    def slow(self: ModelCache, wanted: DrawQuery) -> dict[str, Any]:
        drawn.append(f"{wanted.task} {wanted.seed}")
        if wanted.task == "sst2":  # on the hub
            began.set()
            go.wait(20)
        return {"demos": [], "query": None}

    monkeypatch.setattr(ModelCache, "draw", slow)
    with serving(cache_of(model)) as address:
        calls = [http.client.HTTPConnection(urlsplit(address).netloc, timeout=30) for _ in range(2)]
        for seed, call in enumerate(calls, start=1):
            call.request("POST", "/api/draw", json.dumps({"task": "sst2", "seed": seed}), JSON)
            assert began.wait(10)
        start = time.monotonic()
        assert ask(address, "POST", "/api/draw", {"task": "movie"}).status == 200
        assert time.monotonic() - start < 5
        for call in calls:
            call.close()
        time.sleep(1)  # the server looks a few times a second
        go.set()
        assert ask(address, "POST", "/api/draw", {"task": "sst2", "seed": 3}).status == 200
    assert drawn == ["sst2 1", "movie 1", "sst2 3"]
