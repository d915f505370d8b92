"""A hub for all tests here, and processes that use it with a cache of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from equivalence import tiny
from hub.client import Client
from hub.server import Hub, files_of


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    with Hub().serve() as served:
        yield served


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def online(hub: Hub, home: Path) -> Iterator[Client]:
    client = Client(hub.url, home, HF_HUB_ETAG_TIMEOUT="2", HF_HUB_DOWNLOAD_TIMEOUT="2")
    yield client
    client.close()


@pytest.fixture(scope="session")
def offline(hub: Hub, home: Path) -> Iterator[Client]:
    """With the cache that `online` fills."""
    client = Client(hub.url, home, HF_HUB_OFFLINE="1")
    yield client
    client.close()


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Two commits' worth of a model: the same shape with different weights."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (files_of(tiny.save_model(folder / str(seed), seed=seed)) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="session")
def local_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_task(tmp_path_factory.mktemp("task"))
