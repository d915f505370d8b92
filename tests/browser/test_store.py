"""A store's results in a real Chromium: found, sorted, opened, and the report in its frame."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from browser.watched import fits, no_violations, watched
from dualview.store import Store
from dualview.web import results
from web.live import cache_of, serving
from web.shop import make_store


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("shop"), model)


@pytest.fixture(scope="module")
def address(model: Path, store: Path) -> Generator[str]:
    with serving(cache_of(model), store=results.routes(store)) as found:
        yield found


def test_the_numbers_are_the_store_s(browser: Any, address: str, store: Path) -> None:
    from playwright.sync_api import expect

    with Store(store) as opened:
        stored = list(opened.results())
    with watched(browser, address) as page:
        page.get_by_role("link", name="Results").click()
        rows = page.locator("#cells tbody tr")
        expect(rows).to_have_count(2)
        for each in stored:
            row = page.locator(f'#cells tr[data-key="{each.key}"]')
            text = row.inner_text()
            accuracy, controls = each.result.accuracy, each.result.to_json()["controls"]["sim_aou"]
            for number in (accuracy.zsl, accuracy.icl, accuracy.ft, controls["ci"][0], controls["ci"][1]):
                assert f"{number:.3f}".replace("-", "−") in text
            row.get_by_role("button").click()
            expect(page.locator("#cell-title")).to_contain_text(f"seed {each.result.provenance.seeds.demos}")
            frame = page.frame_locator("#report")
            expect(frame.locator("body")).to_contain_text("SimAOU")
            expect(frame.locator("svg").first).to_be_visible()  # its script ran, in its sandbox
            with page.expect_download() as download:
                page.get_by_role("link", name="JSON").click()
            assert json.loads(Path(download.value.path()).read_text()) == each.result.to_json()
        assert page.url.endswith(f"/store#{stored[-1].key}")
        page.reload()
        expect(page.locator("#cell")).to_be_visible()


def test_finding_and_sorting(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address, path="/store") as page:
        rows = page.locator("#cells tbody tr")
        expect(rows).to_have_count(2)
        page.locator("#find").fill("no such thing")
        expect(rows).to_have_count(0)
        page.locator("#find").fill("tiny")
        expect(rows).to_have_count(2)
        seeds = page.locator("#cells tbody tr td:nth-child(3)")
        button = page.get_by_role("columnheader", name="seed").get_by_role("button")
        button.click()
        expect(seeds).to_have_text(["1", "2"])
        page.keyboard.press("Enter")
        expect(seeds).to_have_text(["2", "1"])
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("seed")


@pytest.mark.parametrize("size", ["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_all(browser: Any, address: str, size: str, scheme: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address, size=size, scheme=scheme, path="/store") as page:
        page.locator("#cells tbody button").first.click()
        expect(page.frame_locator("#report").locator("body")).to_contain_text("SimAOU")
        assert fits(page)
        no_violations(page)


def test_two_runs_side_by_side(browser: Any, address: str, store: Path) -> None:
    """From a cell to the comparison, by keyboard to another; the address alone brings the same view back."""
    from playwright.sync_api import expect

    with Store(store) as opened:
        stored = list(opened.results())
    first, second = stored
    with watched(browser, address, path=f"/store#{second.key}") as page:
        page.get_by_role("link", name="Compare with another").click()
        expect(page.locator("#sides")).to_be_visible()
        assert page.locator("#a").input_value() == second.key and page.locator("#b").input_value() == first.key
        page.get_by_role("button", name="Swap").press("Enter")
        expect(page).to_have_url(f"{address}/store/compare?a={first.key}&b={second.key}")

        def shown() -> None:
            row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="Accuracy, in-context"))
            for each, cell in zip(stored, range(2), strict=True):
                expect(row.locator("td").nth(cell)).to_contain_text(f"{each.result.accuracy.icl:.3f}")
                assert each.result.verdict is not None
                verdict = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="Verdict", exact=True))
                expect(verdict.locator("td").nth(cell)).to_have_text(each.result.verdict.overall)
            for side, each in zip("ab", stored, strict=True):
                chart = page.locator(f"#sim_aou-{side}")
                chart.locator("summary").click()
                layers = each.result.sim_aou.raw_per_layer or []
                wanted = ["" if v is None else f"{v:.3f}".replace("-", "−") for v in layers]
                expect(chart.locator("tbody tr td:nth-child(2)")).to_have_text(wanted)

        shown()
        page.reload()
        shown()
        page.locator("#b").select_option(index=0)
        expect(page.locator("#numbers thead")).to_contain_text("2 draws")
        page.go_back()
        expect(page.locator("#numbers thead")).not_to_contain_text("2 draws")
        shown()


@pytest.mark.parametrize("size", ["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_can_be_read_by_all(browser: Any, address: str, size: str, scheme: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address, size=size, scheme=scheme, path="/store/compare") as page:
        expect(page.locator("#label_contrast-b")).to_be_visible()
        assert fits(page)
        no_violations(page)
