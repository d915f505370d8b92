"""The explorer's server: a static page, and the calls it makes. Every request has passed `policy.Guard` before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dualview import __version__
from dualview.io.errors import UserError
from dualview.web.experiment import answer
from dualview.web.jobs import Busy, Emit, Event, Job, JobProgress, Worker
from dualview.web.model_cache import ModelCache
from dualview.web.policy import App, Guard, Policy, Receive, Scope, Send
from dualview.web.state import LIMITS, DrawQuery, Named, State, read

_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_PAGES = {"/": "index.html", "/store": "store.html", "/store/compare": "compare.html"}


def assets() -> dict[str, tuple[bytes, str]]:
    """Every static file by name, its content and its type: only these can be requested, so no path leads elsewhere."""
    own = resources.files("dualview.web") / "static"
    shared = resources.files("dualview.report.html") / "static"
    files = [entry for folder in (own, shared) for entry in folder.iterdir()]
    known = {file.name: (file, _KINDS.get(file.name[file.name.rfind(".") :])) for file in files if "." in file.name}
    return {name: (file.read_bytes(), kind) for name, (file, kind) in known.items() if kind is not None}


def make_app(model_cache: ModelCache, policy: Policy, *, store: Sequence[Route] = (), waiting: int = 8) -> App:
    """The whole application.

    `store`: the calls of the browser of a store's results (`results.routes`), if there is a store to browse.
    """
    files, worker = assets(), Worker(waiting)
    # Rows come from disk, or from a hub that may be slow: three threads, so that none waits for another.
    disk, hub = Worker(waiting), Worker(waiting)
    notes = {"version": __version__, "models": list(model_cache.models), "tasks": model_cache.about_tasks()}
    about = {**notes, "limits": LIMITS, "store": bool(store)}

    async def page(request: Request) -> Response:
        return _file(files, _PAGES[request.url.path])

    async def static(request: Request) -> Response:
        return _file(files, request.path_params["name"])

    async def tell(_request: Request) -> Response:
        return JSONResponse(about)

    async def draw(request: Request) -> Response:
        wanted = read(DrawQuery, await request.body())

        def work(emit: Emit) -> None:
            emit({"event": "drawn", **model_cache.draw(wanted)})

        found = await until_gone(request, (hub if model_cache.on_hub(wanted.task) else disk).submit(work))
        if "error" in found:
            return JSONResponse({"error": found["error"]}, found["status"])
        return JSONResponse(found)

    async def load(request: Request) -> Response:
        name = read(Named, await request.body()).model
        model_cache.check_model(name)

        def work(emit: Emit) -> None:
            emit({"event": "loaded", **model_cache.about_model(name, JobProgress(emit))})

        return EventStream(worker.submit(work))

    async def experiment(request: Request) -> Response:
        state = read(State, await request.body())
        model_cache.check_model(state.model)

        def work(emit: Emit) -> None:
            answer(state, model_cache, emit)

        return EventStream(worker.submit(work))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        for thread in (worker, disk, hub):
            thread.start()
        yield
        for thread in (worker, disk, hub):
            thread.stop()

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/api/about", tell),
        Route("/api/load", load, methods=["POST"]),
        Route("/api/draw", draw, methods=["POST"]),
        Route("/api/answer", experiment, methods=["POST"]),
        *([Route("/store", page), Route("/store/compare", page), *store] if store else []),
    ]
    handlers = dict.fromkeys((UserError, Busy, HTTPException, Exception), _refused)
    return Guard(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), policy)


class EventStream(StreamingResponse):
    """A job's events as lines of JSON; when the page disconnects, the job is cancelled, waiting or running."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.lines(), media_type="application/x-ndjson")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def until_gone(request: Request, job: Job) -> Event:
    """A job's last event; when the page disconnects first, the job is cancelled, waiting or running."""

    async def gone() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.2)
        job.cancel()

    watching = asyncio.create_task(gone())
    try:
        return await job.result()
    finally:
        job.cancel()
        watching.cancel()


def _file(files: Mapping[str, tuple[bytes, str]], name: str) -> Response:
    if name not in files:
        raise HTTPException(404)
    content, kind = files[name]
    return Response(content, media_type=kind)


async def _refused(request: Request, error: Exception) -> Response:
    """Whatever went wrong, as one sentence."""
    if isinstance(error, UserError):
        return JSONResponse({"error": str(error)}, 400)
    if isinstance(error, Busy):
        sentence = "The server is busy and its queue is full; try again in a moment."
        return JSONResponse({"error": sentence}, 503, {"retry-after": "5"})
    if isinstance(error, HTTPException):
        nothing = error.status_code == 404 and error.detail == "Not Found"
        sentence = f"There is nothing at {request.url.path}." if nothing else f"{error.detail}."
        return JSONResponse({"error": sentence}, error.status_code)
    return JSONResponse({"error": "Something went wrong on the server; its log says what."}, 500)
