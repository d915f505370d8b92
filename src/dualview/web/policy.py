"""Who may ask the explorer's server for what: every request passes here before anything else sees it.

The server computes on its owner's machine, so a page of another origin, open in the same browser, must not be able to
use it. In order: an exact list of Host headers (against DNS rebinding), the token if there is one, fetch metadata and
Origin (against forged requests), the method, JSON alone as a body, and a bound on the body's size and time. Every
answer carries a content-security policy without inline scripts or styles.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response

from dualview.io.errors import UserError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = "127.0.0.1"
SHORTEST_TOKEN = 16
_HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
"""A name, an address or one in brackets, and a port unless it is the scheme's own."""

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Policy:
    """What is let through."""

    hosts: frozenset[str]
    """Host headers as browsers send them, with the port unless it is the scheme's own."""
    token: str | None = None
    cookie: str = "dualview"
    """The name the token's cookie goes by."""
    max_body: int = 256 * 1024
    body_seconds: float = 10.0


def _refusal(status: int, sentence: str) -> Response:
    """Why a request goes no further, in one sentence."""
    return JSONResponse({"error": sentence}, status)


def policy_for(host: str, port: int, *, token: str | None = None, names: Sequence[str] = ()) -> Policy:
    """The policy of a server bound to `host`; any address but 127.0.0.1 needs a token.

    `names` are further Host headers it is reached by, written as the browser sends them (`box.example:8765`).
    """
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(f"--token is too short to be a secret; give at least {SHORTEST_TOKEN} characters.")
    if token is not None and not (token.isascii() and token.isprintable() and not set(token) & set(' ;,"\\')):
        raise UserError(
            "--token must be plain letters, digits and signs; blanks, quotes, commas and semicolons are not."
        )
    if host != LOOPBACK and token is None:
        raise UserError(
            f"--host {host} lets other machines in, so it needs --token; without one the server binds {LOOPBACK} only."
        )
    for name in names:
        if not _HOST.fullmatch(name):
            raise UserError(f"--allow-host {name!r} is no Host header; give a name and port, as in box.example:8765.")
    shown = f"[{host}]" if ":" in host else host
    own = {f"{name}:{port}" for name in (LOOPBACK, "localhost", shown)}
    if port == 80:  # browsers leave the scheme's own port out
        own |= {name.removesuffix(":80") for name in own}
    # Cookies are not kept apart by port, so their names are.
    return Policy(frozenset(name.lower() for name in (*own, *names)), token, f"dualview-{port}")


class Guard:
    """The policy around an application."""

    def __init__(self, app: App, policy: Policy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets: nothing here speaks them
            await send({"type": "websocket.close", "code": 1008})
            return

        async def sealed(message: Message) -> None:
            """Send, with the headers that every answer carries where it does not set its own."""
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    own.setdefault(name, value)
            await send(message)

        policy, headers = self.policy, Headers(scope=scope)
        answer = _foreign_host(policy, headers) or _welcome(policy, scope) or _stranger(policy, headers)
        answer = answer or _forged(scope, headers) or _unfit(scope, headers)
        if answer is None and scope["method"] == "POST":
            body = await _read(policy, headers, receive)
            if isinstance(body, Response):
                answer = body
            else:
                receive = _replayed(body, receive)
        await (answer or self.app)(scope, receive, sealed)


def _foreign_host(policy: Policy, headers: Headers) -> Response | None:
    named = headers.getlist("host")
    if len(named) == 1 and named[0].lower() in policy.hosts:
        return None
    return _refusal(
        403, "This server does not go by that Host name; use the address it printed, or start it with --allow-host."
    )


def _welcome(policy: Policy, scope: Scope) -> Response | None:
    """The first visit, with the token in the address: keep it in a cookie and take it out of the address."""
    if policy.token is None or scope["method"] != "GET" or scope["path"] not in ("/", "/store"):
        return None
    offered = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
    if len(offered) != 1 or not _same(offered[0], policy.token):
        return None
    welcome = RedirectResponse(scope["path"], 303)
    # Lax, not strict: a strict cookie would be held back on the way in from a link in a message.
    welcome.set_cookie(policy.cookie, policy.token, httponly=True, samesite="lax")
    return welcome


def _stranger(policy: Policy, headers: Headers) -> Response | None:
    if policy.token is None:
        return None
    offered = [value.removeprefix("Bearer ") for value in headers.getlist("authorization") if "Bearer " in value]
    offered += [cookie_parser(line).get(policy.cookie, "") for line in headers.getlist("cookie")]
    if any(_same(value, policy.token) for value in offered):
        return None
    return _refusal(401, "This server needs its token; open the address with ?token= that `dualview serve` printed.")


def _same(offered: str, token: str) -> bool:
    return hmac.compare_digest(offered.encode(), token.encode())


def _forged(scope: Scope, headers: Headers) -> Response | None:
    """A request another site's page made: by its Origin, or by what the browser says of where it comes from.

    A link to the page itself may be followed from anywhere. What sends neither header is no browser.
    """
    foreign = _refusal(403, "This request comes from another site's page; only the explorer's own page may make it.")
    own = {f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")}
    if any(origin.lower() not in own for origin in headers.getlist("origin")):
        return foreign
    sites = headers.getlist("sec-fetch-site")
    if scope["method"] == "POST":
        return foreign if any(site != "same-origin" for site in sites) else None
    followed = headers.getlist("sec-fetch-mode") == ["navigate"] and headers.getlist("sec-fetch-dest") == ["document"]
    return foreign if any(site not in ("same-origin", "none") for site in sites) and not followed else None


def _unfit(scope: Scope, headers: Headers) -> Response | None:
    if scope["method"] not in ("GET", "HEAD", "POST"):
        return _refusal(405, f"The method {scope['method']} is not taken here; use GET or POST.")
    if scope["method"] == "POST":
        kinds = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
        if kinds != ["application/json"]:
            return _refusal(415, "The body must be JSON; send it with content-type application/json.")
    return None


async def _read(policy: Policy, headers: Headers, receive: Receive) -> bytes | Response:
    """The whole body, if it is small enough and comes in time."""
    too_large = _refusal(413, f"The request is too large; at most {policy.max_body // 1024} KiB are taken.")
    promised = headers.get("content-length", "0")
    if promised.isdecimal() and int(promised) > policy.max_body:
        return too_large
    body = bytearray()
    try:
        async with asyncio.timeout(policy.body_seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return _refusal(400, "The request ended before its body was whole.")
                body += message.get("body", b"")
                if len(body) > policy.max_body:
                    return too_large
                more = message.get("more_body", False)
    except TimeoutError:
        return _refusal(408, "The request's body took too long to arrive; send it again.")
    return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more for the application, then whatever the connection says."""
    rest = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(rest, None) or await receive()

    return again
