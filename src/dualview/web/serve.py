"""Binding, announcing and running the explorer's server."""

from __future__ import annotations

import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import uvicorn

from dualview.io.errors import UserError
from dualview.models.devices import BALANCED, pick_device
from dualview.models.reader import locate
from dualview.options import RunOptions
from dualview.report.build import is_store
from dualview.web import results
from dualview.web.app import make_app
from dualview.web.model_cache import ModelCache
from dualview.web.policy import LOOPBACK, policy_for


def serve(
    *,
    port: int = 8765,
    host: str = LOOPBACK,
    model: Sequence[str] = ("embedded",),
    store: Path | None = None,
    data: Path | None = None,
    token: str | None = None,
    allow_host: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "auto",
    no_browser: bool = False,
) -> None:
    """Serve the explorer until it is interrupted.

    port         0 takes a free one
    host         any address but 127.0.0.1 needs a token
    model        the models the page may choose from: embedded, a folder, a .gguf file, a hub id
    store        a store to browse at /store
    data         rows of the library's tasks, in <task>/{train,validation}.jsonl, instead of the hub
    token        asked for on every call (at least 16 characters)
    allow_host   further Host headers the server is reached by, as browsers send them (box.example:8765)
    """
    if not model:
        raise UserError("The explorer needs at least one model; give --model.")
    if data is not None and not data.is_dir():
        raise UserError(f"{data} is not a folder; --data takes one with <task>/train.jsonl and validation.jsonl in it.")
    RunOptions.make(dtype=dtype, device=device)
    if device != BALANCED:
        pick_device(device)
    for name in model:
        if name != "embedded":  # it is fetched on its first use
            locate(name)
    if store is not None and not is_store(store):
        raise UserError(f"{store} is not a store; --store takes a folder that `sweep` wrote.")
    policy_for(host, port, token=token, names=allow_host)  # before anything is bound
    model_cache = ModelCache(model, data=data, dtype=dtype, device=device)
    routes = [] if store is None else results.routes(store)
    listening = listen(host, port)
    number = int(listening.getsockname()[1])
    app = make_app(model_cache, policy_for(host, number, token=token, names=allow_host), store=routes)
    address = f"http://{f'[{host}]' if ':' in host else host}:{number}/"
    opened = address if token is None else f"{address}?token={quote(token, safe='')}"
    with suppress(UserError):  # a service may have no standard output, and does not need it
        print(f"dualview explorer: {opened}", flush=True)
    print("Ctrl-C stops it.", file=sys.stderr, flush=True)
    if host != LOOPBACK and not allow_host:
        print(f"Others may use the name you give with --allow-host, as in box.example:{number}.", file=sys.stderr)
    if not no_browser:
        webbrowser.open(opened)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would log the token of a first visit
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=200,
    )
    with listening, suppress(KeyboardInterrupt):  # uvicorn raises it again once it has shut down: the ordinary end
        uvicorn.Server(config).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A bound socket: its port is known before the list of Host names is made, and a taken one is a sentence."""
    if not 0 <= port < 65536:
        raise UserError(f"--port is {port}; a port is a number from 0 to 65535.")
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        why = error.strerror or str(error)
        raise UserError(f"Cannot listen on {host}, port {port} ({why}); choose another with --port.") from error
    return found
