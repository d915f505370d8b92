"""The store's browser over the wire: its list and results are the store's own, and its frames can do no harm."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path

import pytest

from dualview.io.errors import UserError
from dualview.store import Store
from dualview.web import results
from web.live import cache_of, serving
from web.shop import make_store
from web.test_server import ask


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("shop"), model)


@pytest.fixture(scope="module")
def address(model: Path, store: Path) -> Generator[str]:
    with serving(cache_of(model), store=results.routes(store)) as found:
        yield found


def test_the_list_is_the_store_s(address: str, store: Path) -> None:
    listed = ask(address, "GET", "/api/store").json
    assert ask(address, "GET", "/api/about").json["store"] is True
    with Store(store) as opened:
        frame = opened.to_frame().set_index("key")
    assert [cell["seed"] for cell in listed["cells"]] == [1, 2]
    for cell in listed["cells"]:
        row = frame.loc[cell["key"]]
        for name in ("accuracy_icl", "sim_aou_raw", "sim_aou_raw_floor", "sim_aou_raw_ci_low", "sim_am_delta"):
            assert cell[name] == (None if math.isnan(row[name]) else row[name])
        assert cell["verdict"] == row["verdict"]
    assert listed["failures"] == [] and listed["problems"] == []


def test_a_result_is_the_store_s(address: str, store: Path) -> None:
    with Store(store) as opened:
        for stored in opened.results():
            assert ask(address, "GET", f"/api/store/{stored.key}").json == stored.result.to_json()


def test_a_report_is_framed_and_locked_up(address: str, store: Path) -> None:
    with Store(store) as opened:
        key = opened.keys()[0]
    report = ask(address, "GET", f"/store/report/{key}")
    policy = report.headers["content-security-policy"]
    assert report.status == 200 and b"SimAOU" in report.body
    assert "sandbox allow-scripts;" in policy and "allow-same-origin" not in policy
    assert "frame-ancestors 'self'" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    assert report.headers["x-frame-options"] == "SAMEORIGIN" and report.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in ask(address, "GET", "/store").headers["content-security-policy"]


@pytest.mark.parametrize(
    "key", ["0" * 64, "x", "..", "%2e%2e", "0" * 63, "A" * 64, "..%2fstore.json", "0" * 64 + "%0a"]
)
def test_unknown_cells(address: str, key: str) -> None:
    for path in (f"/api/store/{key}", f"/store/report/{key}"):
        reply = ask(address, "GET", path)
        assert reply.status in (400, 404) and reply.json["error"].endswith(".")


def test_reads_are_for_the_own_page_alone(address: str) -> None:
    for headers in ({"host": "evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}):
        assert ask(address, "GET", "/api/store", headers=headers).status == 403


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no store"):
        results.routes(tmp_path / "nothing")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(UserError, match="not a store"):
        results.routes(tmp_path)
