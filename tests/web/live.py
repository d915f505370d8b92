"""A tiny model behind the real server: uvicorn on a free port, in a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from dualview.web.app import make_app
from dualview.web.model_cache import ModelCache
from dualview.web.policy import policy_for
from dualview.web.serve import listen

TEMPLATE = "Review: {text} Sentiment:"
LABELS = ["Negative", "Positive"]


def row(text: str, label: int | None) -> dict[str, Any]:
    return {"fields": {"text": text}, "label": label, "choices": None}


def document(model: object, **changes: Any) -> dict[str, Any]:
    """A state the tiny model can be asked."""
    demos = [row("the film was fine", 1), row("a dull story", 0), row("very warm and clever", 1)]
    return {
        "model": str(model),
        "template": TEMPLATE,
        "labels": LABELS,
        "separator": "\n",
        "demos": demos,
        "query": row("the plot was slow and very dull", 0),
        "lr": 0.05,
        "epochs": 1,
        "ft_loss": "all",
        "drawn": None,
        **changes,
    }


def cache_of(model: object, *, data: Path | None = None, dtype: str = "float64") -> ModelCache:
    return ModelCache([str(model)], data=data, dtype=dtype, device="cpu")


@contextmanager
def serving(
    model_cache: ModelCache, *, token: str | None = None, store: Sequence[Any] = (), waiting: int = 8
) -> Generator[str]:
    """The address of a running server."""
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    app = make_app(model_cache, policy_for("127.0.0.1", port, token=token), store=store, waiting=waiting)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1, server_header=False)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()
