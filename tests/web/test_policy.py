"""The network policy alone, around an application that says yes to everything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse

from dualview.io.errors import UserError
from dualview.web.policy import CONTENT_POLICY, Guard, Policy, policy_for

HOST = "127.0.0.1:8765"
TOKEN = "a-long-enough-secret"
JSON = {"content-type": "application/json"}


async def yes(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    await JSONResponse({"read": len(body)})(scope, receive, send)


class Answer:
    def __init__(self, sent: list[Any]) -> None:
        self.status = sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in sent[1:])


def ask(
    policy: Policy | None = None,
    method: str = "GET",
    path: str = "/api/about",
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    chunks: tuple[bytes, ...] = (b"",),
    query: str = "",
    pause: float = 0.0,
) -> Answer:
    """One request straight into the guard, with any headers whatsoever."""
    given_headers = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
    if not any(name.lower() == "host" for name, _ in given_headers):
        given_headers.append(("host", HOST))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given_headers],
    }
    sent: list[Any] = []
    rest = list(chunks)

    async def receive() -> Any:
        await asyncio.sleep(pause)
        if not rest:
            return {"type": "http.disconnect"}
        body = rest.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(rest)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(yes, policy or policy_for("127.0.0.1", 8765))(scope, receive, send))
    return Answer(sent)


@pytest.mark.parametrize("host", [HOST, "localhost:8765", "LOCALHOST:8765"])
def test_own_names_are_let_in(host: str) -> None:
    assert ask(headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "127.0.0.1",
        "127.0.0.1:80",
        "localhost",
        "127.0.0.1:8765.evil.example",
        "",
        "x" * 4000,
    ],
)
def test_other_hosts_are_refused(host: str) -> None:
    answer = ask(headers={"host": host})
    assert answer.status == 403 and b"Host" in answer.body


def test_no_host_or_two_are_refused() -> None:
    assert ask(headers=[("host", HOST), ("host", "evil.example")]).status == 403
    assert ask(headers=[("host", HOST), ("host", HOST)]).status == 403


@given(st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=40))
def test_only_listed_hosts(host: str) -> None:
    expected = 200 if host.lower() in {HOST, "localhost:8765"} else 403
    assert ask(headers={"host": host}).status == expected


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": f"ftp://{HOST}"},
        {"origin": f"http://{HOST}/"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ],
)
def test_forged_posts_are_refused(headers: dict[str, str]) -> None:
    answer = ask(method="POST", headers={**JSON, **headers})
    assert answer.status == 403 and b"another site" in answer.body


@pytest.mark.parametrize(
    "headers", [{}, {"origin": f"http://{HOST}"}, {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}]
)
def test_own_posts_are_let_through(headers: dict[str, str]) -> None:
    answer = ask(method="POST", headers={**JSON, **headers}, chunks=(b'{"a":', b"1}"))
    assert answer.status == 200 and answer.body == b'{"read":7}'


def test_reads_from_other_sites() -> None:
    assert (
        ask(headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}).status
        == 403
    )
    assert (
        ask(headers={"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}).status
        == 403
    )
    assert (
        ask(headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}).status
        == 200
    )
    assert ask(headers={"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}).status == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT", "FOO"])
def test_other_methods_are_refused(method: str) -> None:
    assert ask(method=method).status == 405


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_can_send_is_refused(kind: str | None) -> None:
    assert ask(method="POST", headers={} if kind is None else {"content-type": kind}).status == 415


def test_bodies_are_bounded() -> None:
    small = Policy(frozenset({HOST}), max_body=1000)
    assert ask(small, "POST", headers=JSON, chunks=(b"x" * 1000,)).status == 200
    assert ask(small, "POST", headers=JSON, chunks=(b"x" * 1001,)).status == 413
    assert ask(small, "POST", headers=JSON, chunks=(b"x" * 600, b"x" * 600)).status == 413
    promised = ask(small, "POST", headers={**JSON, "content-length": "1000000000000"})
    assert promised.status == 413 and b"KiB" in promised.body
    lied = ask(small, "POST", headers={**JSON, "content-length": "1"}, chunks=(b"x" * 2000,))
    assert lied.status == 413
    assert ask(small, "POST", headers={**JSON, "content-length": "-5"}, chunks=(b"x" * 2000,)).status == 413


def test_slow_and_broken_bodies_end() -> None:
    slow = Policy(frozenset({HOST}), body_seconds=0.05)
    assert ask(slow, "POST", headers=JSON, chunks=(b"x",) * 50, pause=0.01).status == 408
    assert ask(method="POST", headers=JSON, chunks=()).status == 400


def test_the_token_is_needed_everywhere() -> None:
    policy = policy_for("127.0.0.1", 8765, token=TOKEN)
    for path in ("/", "/api/about", "/static/main.js", "/nowhere"):
        answer = ask(policy, path=path)
        assert answer.status == 401 and b"token" in answer.body
    for bad in ({"authorization": "Bearer wrong-but-long-enough"}, {"authorization": TOKEN}, {"cookie": "a=b; c"}):
        assert ask(policy, headers=bad).status == 401
    assert ask(policy, query=f"token={TOKEN}").status == 401  # in the address only of the pages themselves
    assert ask(policy, headers={"authorization": f"Bearer {TOKEN}"}).status == 200
    assert ask(policy, "POST", headers={**JSON, "authorization": f"Bearer {TOKEN}"}).status == 200
    forged = {**JSON, "authorization": f"Bearer {TOKEN}", "origin": "http://evil.example"}
    assert ask(policy, "POST", headers=forged).status == 403


def test_the_first_visit_turns_the_token_into_a_cookie() -> None:
    policy = policy_for("127.0.0.1", 8765, token=TOKEN)
    welcome = ask(policy, path="/", query=f"token={TOKEN}")
    assert welcome.status == 303 and welcome.headers["location"] == "/"
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert ask(policy, path="/", headers={"cookie": cookie.split(";")[0]}).status == 200
    assert ask(policy, path="/", query="token=wrong").status == 401
    assert ask(policy, path="/", query=f"token={TOKEN}&token={TOKEN}").status == 401
    assert ask(policy, path="/", query=f"token={TOKEN}", headers={"host": "evil.example"}).status == 403


def test_every_answer_is_sealed() -> None:
    for answer in (ask(), ask(headers={"host": "evil"}), ask(method="PUT"), ask(method="POST", headers=JSON)):
        assert answer.headers["content-security-policy"] == CONTENT_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "unsafe" not in CONTENT_POLICY and "frame-ancestors 'none'" in CONTENT_POLICY
    assert "http:" not in CONTENT_POLICY and "*" not in CONTENT_POLICY


def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(Guard(yes, policy_for("127.0.0.1", 8765))({"type": "websocket", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "localhost", "127.0.0.2", "example.org", ""])
def test_another_address_needs_a_token(host: str) -> None:
    with pytest.raises(UserError, match="--token"):
        policy_for(host, 8765)
    assert policy_for(host, 8765, token=TOKEN).token == TOKEN


def test_tokens_must_be_secrets() -> None:
    for bad in ("short", "with a blank in the middle", "semi;colon;semi;colon", "ümlaut-ümlaut-ümlaut"):
        with pytest.raises(UserError, match="--token"):
            policy_for("127.0.0.1", 8765, token=bad)


def test_names_are_taken_exactly() -> None:
    policy = policy_for("0.0.0.0", 81, token=TOKEN, names=["Box.example", "[::1]:81"])
    assert policy.hosts == {"127.0.0.1:81", "localhost:81", "0.0.0.0:81", "box.example", "[::1]:81"}
    assert policy_for("::1", 80, token=TOKEN).hosts >= {"[::1]:80", "[::1]", "localhost"}
    assert policy.cookie != policy_for("127.0.0.1", 82, token=TOKEN).cookie
