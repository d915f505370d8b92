"""The browser of a store's results: the list of cells, one cell's result, its report in a frame of its own, and two
runs or models side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from dualview.io.json_files import plain
from dualview.report.html.page import policy
from dualview.report.html.prompts import Missing
from dualview.report.html.run import render
from dualview.store.api import ls
from dualview.store.paths import KEY
from dualview.store.store import Store
from dualview.web.side_by_side import compare, groups_json

COLUMNS = (
    *("key", "model", "weights", "task", "labels", "seed", "shots_used", "n_queries_used"),
    *("ft_rule", "lr", "ft_status"),
    *("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp_value", "rec2ftp_chance", "rec2ftp_p"),
    *(f"{name}{part}" for name in ("sim_aou_raw", "sim_am_delta") for part in ("", "_ci_low", "_ci_high", "_floor")),
    *("verdict", "verdict_sentence"),
)
# The frame may run the report's own script, which the policy knows by its hash; it has no origin, so it can reach
# neither this page nor the server.
FRAMED = {
    "content-security-policy": f"sandbox allow-scripts; {policy()}; frame-ancestors 'self'",
    "x-frame-options": "SAMEORIGIN",
}
# A report from here shows no prompts: to rebuild them it would read models and rows that a result names.
NO_PROMPTS = Missing(
    "The explorer does not read the models and rows that a stored result names; `dualview report` does"
)


def routes(store: Path) -> list[Route]:
    """The calls of the browser of one store; a folder that is not a store is an error at once."""
    Store(store).close()
    turns = asyncio.Semaphore(2)  # reading takes disk and CPU time too: the experiments need some

    def reading(work: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            async with turns:
                return await run_in_threadpool(work, request)

        return handle

    @reading
    def cells(_request: Request) -> Response:
        return JSONResponse(_cells(store))

    @reading
    def result(request: Request) -> Response:
        key = _key(request)
        with Store(store) as opened:
            return JSONResponse(opened.result(opened.find(key)).to_json())

    @reading
    def report(request: Request) -> Response:
        key = _key(request)
        with Store(store) as opened:
            page = render(opened.result(opened.find(key)), records=opened.records(key), prompts=NO_PROMPTS)
        return HTMLResponse(page, headers=FRAMED)

    @reading
    def sides(request: Request) -> Response:
        return JSONResponse(compare(store, *(request.query_params.get(name, "") for name in ("a", "b"))))

    return [
        Route("/api/compare", sides),
        Route("/api/store", cells),
        Route("/api/store/{key}", result),
        Route("/store/report/{key}", report),
    ]


def _key(request: Request) -> str:
    key = request.path_params["key"]
    if not KEY.fullmatch(key):
        raise HTTPException(404)
    return key


def _cells(store: Path) -> dict[str, Any]:
    """Every current cell's main numbers, with floor and interval, and what failed."""
    listing = ls(store)
    rows = [{name: plain(cell.get(name)) for name in COLUMNS} for cell in listing.cells]
    failures = [failure.reason for failure in listing.failures]
    groups = groups_json(listing.cells)
    return {"store": str(store), "cells": rows, "groups": groups, "failures": failures, "problems": listing.problems}
