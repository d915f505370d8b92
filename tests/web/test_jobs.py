"""One thread computes; what waits, leaves, fails or comes too many is dealt with."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dualview.io.errors import UserError
from dualview.web.jobs import Busy, Cancelled, JobProgress, Worker


def with_worker(test: Callable[[Worker], Coroutine[Any, Any, None]], waiting: int = 2) -> None:
    async def whole() -> None:
        worker = Worker(waiting)
        worker.start()
        try:
            await asyncio.wait_for(test(worker), 20)
        finally:
            await asyncio.to_thread(worker.stop)

    asyncio.run(whole())


async def all_events(job: Any) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in job.lines()]


def test_events_come_in_order_after_the_place_in_the_queue() -> None:
    async def test(worker: Worker) -> None:
        job = worker.submit(lambda emit: [emit({"n": n}) for n in range(5)])  # pyright: ignore
        events = await all_events(job)
        assert events == [{"event": "queued", "ahead": 0}, *({"n": n} for n in range(5))]
        assert (await worker.submit(lambda emit: emit({"n": 7})).result())["n"] == 7

    with_worker(test)


def test_one_at_a_time_and_no_more_than_may_wait() -> None:
    async def test(worker: Worker) -> None:
        started, go = threading.Event(), threading.Event()
        order: list[int] = []

        def first(emit: Any) -> None:
            started.set()
            go.wait(10)
            order.append(0)

        jobs = [worker.submit(first)]
        await asyncio.to_thread(started.wait, 10)
        jobs += [worker.submit(lambda emit, n=n: order.append(n)) for n in (1, 2)]
        assert [job.ahead for job in jobs] == [0, 1, 2]
        with pytest.raises(Busy):
            worker.submit(lambda emit: None)
        go.set()
        for job in jobs:
            await all_events(job)
        assert order == [0, 1, 2]
        await all_events(worker.submit(lambda emit: None))

    with_worker(test)


def test_those_who_leave_give_their_place_up() -> None:
    async def test(worker: Worker) -> None:
        started, go = threading.Event(), threading.Event()
        ran: list[str] = []

        def first(emit: Any) -> None:
            started.set()
            go.wait(10)
            emit({"told": "nobody"})
            ran.append("went on")

        running = worker.submit(first)
        await asyncio.to_thread(started.wait, 10)
        waiting = [worker.submit(lambda emit: ran.append("waited")) for _ in range(2)]
        for job in (running, *waiting):
            job.cancel()
        last = worker.submit(lambda emit: ran.append("last"))
        go.set()
        await all_events(last)
        assert ran == ["last"]

    with_worker(test)


def test_mistakes_are_told_and_failures_hidden(caplog: pytest.LogCaptureFixture) -> None:
    def fails(error: BaseException) -> Callable[[Any], None]:
        def work(emit: Any) -> None:
            raise error

        return work

    async def test(worker: Worker) -> None:
        mistake = await worker.submit(fails(UserError("Give a number."))).result()
        assert mistake == {"event": "error", "error": "Give a number.", "status": 400}
        with caplog.at_level(logging.ERROR):
            failure = await worker.submit(fails(RuntimeError("the secret path"))).result()
        assert failure["status"] == 500 and "secret" not in failure["error"]
        assert "the secret path" in caplog.text
        assert "memory" in (await worker.submit(fails(MemoryError())).result())["error"]
        assert (await worker.submit(lambda emit: emit({"n": 1})).result())["n"] == 1

    with_worker(test)


def test_what_is_not_json_is_a_failure_not_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    async def test(worker: Worker) -> None:
        assert (await worker.submit(lambda emit: emit({"n": float("nan")})).result())["status"] == 500

    with_worker(test)


def test_stopping_ends_every_line() -> None:
    async def whole() -> None:
        worker = Worker(4)
        worker.start()
        started = threading.Event()

        def endless(emit: Any) -> None:
            started.set()
            while True:
                emit({"event": "part"})

        jobs = [worker.submit(endless), worker.submit(endless)]
        await asyncio.to_thread(started.wait, 10)
        await asyncio.to_thread(worker.stop)
        for job in jobs:
            await asyncio.wait_for(all_events(job), 10)

    asyncio.run(whole())


def test_progress_becomes_events_and_stops_the_work_of_the_gone() -> None:
    seen: list[Any] = []
    with JobProgress(seen.append).part("training", 3) as advance:
        advance(1)
        advance(2)
    assert [(e["part"], e["done"], e["total"]) for e in seen] == [("training", n, 3) for n in (0, 1, 3)]

    def gone(_event: Any) -> None:
        raise Cancelled

    with pytest.raises(Cancelled), JobProgress(gone).part("training", 3):
        raise AssertionError("the part must not begin")


def test_a_running_job_that_was_left_is_not_waited_behind() -> None:
    """It ends at its next word: whoever left it and asks again is not told of another before."""

    async def test(worker: Worker) -> None:
        started, go = threading.Event(), threading.Event()

        def first(emit: Any) -> None:
            started.set()
            go.wait(10)
            emit({"told": "nobody"})

        running = worker.submit(first)
        await asyncio.to_thread(started.wait, 10)
        assert worker.submit(lambda emit: None).ahead == 1
        running.cancel()
        assert worker.submit(lambda emit: None).ahead == 1  # the one that waits
        go.set()
        await all_events(running)

    with_worker(test)
