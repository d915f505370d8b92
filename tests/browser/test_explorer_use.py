"""The explorer for everyone: by keyboard, in either theme, on a phone, through mistakes and changes of mind."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from browser.explorer import QUERY, run, write_demos
from browser.watched import fits, no_violations, watched
from web.live import document


def test_by_keyboard_alone(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        expect(page.locator("#model-note")).to_contain_text("parameters")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the answers"
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "run":
                break
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text("Done in")
        page.locator("#aou-chart .chart-plot").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#aou-chart .chart-tip")).to_contain_text("layer")


def test_stopping(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        page.route("**/api/answer", lambda route: None)  # a server that takes its time
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#status")).to_have_text("Stopped.")
        page.unroute("**/api/answer")
        run(page)


@pytest.mark.parametrize("size", ["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_all(browser: Any, address: str, size: str, scheme: str) -> None:
    with watched(browser, address, size=size, scheme=scheme) as page:
        assert fits(page)
        no_violations(page)
        run(page)
        page.locator("#wording > summary").click()
        page.get_by_text("Normalised SimAOU, the size").click()
        page.locator("#aou-chart summary").click()
        page.locator("#layer").select_option("0")
        assert fits(page)
        no_violations(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) > 384
        assert light == (scheme == "light")


def test_the_theme_can_be_chosen(browser: Any, address: str) -> None:
    with watched(browser, address, scheme="light") as page:
        button = page.locator("#theme")
        assert button.inner_text() == "Theme: auto"
        button.click()
        button.click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_download_is_of_one_run(browser: Any, address: str) -> None:
    """While a run that was just asked for has told nothing yet, the numbers shown are the last run's, and its state."""
    with watched(browser, address) as page:
        write_demos(page)
        run(page)
        page.locator("#auto").uncheck()
        page.route("**/api/answer", lambda route: None)  # a server that takes its time
        page.locator("#lr").fill("0.2")
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("button", name="Run again").wait_for()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download the numbers").click()
        content = json.loads(Path(download.value.path()).read_text())
        assert content["state"]["lr"] == 0.05 and content["settings"]["ft"]["lr"] == 0.05
        assert "asked" not in content


def test_numbers_of_before_a_change_are_marked(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        write_demos(page)
        expect(page.locator("#stale")).to_be_hidden()
        run(page)
        expect(page.locator("#stale")).to_be_hidden()
        page.locator("#auto").uncheck()
        page.get_by_label("Query: text").fill("another one")
        expect(page.locator("#stale")).to_be_visible()
        no_violations(page)
        page.get_by_label("Query: text").fill(QUERY)
        expect(page.locator("#stale")).to_be_hidden()
        page.locator("#lr").fill("0.2")
        expect(page.locator("#stale")).to_be_visible()
        run(page)
        expect(page.locator("#stale")).to_be_hidden()


def test_layers_and_heads_count_from_0(browser: Any, address: str) -> None:
    with watched(browser, address) as page:
        write_demos(page)
        run(page)
        assert page.locator("#layer option").all_text_contents() == [
            "all layers (mean)",
            "layer 0",
            "layer 1",
            "layer 2",
        ]
        assert page.locator("#head option").all_text_contents()[1:] == [f"head {n}" for n in range(4)]
        ticks = page.locator("#aou-chart svg[role=img] text[text-anchor=middle]").all_text_contents()
        assert ticks == ["0", "1", "2", "layer"]
        page.get_by_text("Normalised SimAOU, the size").click()
        plot = page.locator("#mass-chart .chart-plot")
        plot.focus()
        page.keyboard.press("Home")
        assert "layer 0, head 0" in plot.inner_text()


def test_a_label_in_use_is_not_removed(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        write_demos(page)
        page.locator("#wording > summary").click()
        page.get_by_role("button", name="Add a label").click()
        page.get_by_label("Label 2", exact=True).fill("Neither")
        flip = page.get_by_role("button", name="Label of demonstration 0:")
        flip.click()
        assert flip.inner_text() == "Neither"
        page.get_by_role("button", name="Remove label 2").click()
        expect(page.get_by_role("alert")).to_have_text(
            "The label “Neither” is that of demonstration 0; choose another there before you remove it."
        )
        assert page.locator("#labels input").count() == 3 and flip.inner_text() == "Neither"
        page.get_by_role("button", name="Remove label 0").click()
        expect(page.get_by_role("alert")).to_contain_text("demonstration 1")
        flip.click()
        page.get_by_role("button", name="Remove label 2").click()
        expect(page.locator("#error")).to_be_hidden()
        assert page.locator("#labels input").count() == 2
        labels = page.locator("#demos .flip").all_inner_texts()
        assert labels == ["Negative", "Negative", "Positive"]


def test_a_number_out_of_range_in_a_folded_part_is_shown(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        more = page.locator("details", has=page.locator("#epochs"))
        for value in ("9", "", "1.5"):
            page.locator("#epochs").evaluate("(field, v) => { field.value = v; }", value)
            more.evaluate("(part) => { part.open = false; }")
            page.get_by_role("button", name="Run", exact=True).click()
            expect(page.get_by_role("alert")).to_have_text("Epochs must be a whole number from 1 to 5.")
            expect(page.locator("#epochs")).to_be_visible()
            assert page.evaluate("document.activeElement.id") == "epochs"
        page.locator("#epochs").fill("1")
        page.locator("#lr").fill("2")
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.get_by_role("alert")).to_have_text("The learning rate must be a number from 0 to 1.")
        page.locator("#lr").fill("0.05")
        run(page)
        page.locator("#task").select_option("sst2")
        page.locator("#shots").fill("65")
        expect(page.locator("#setting-ft .value")).to_have_count(2)
        expect(page.locator("#stale")).to_be_hidden()  # what was drawn first is there, and has been run
        expect(page.locator("#status")).to_contain_text("Done in")
        assert page.locator("#shots").input_value() == "65"
        page.get_by_role("button", name="Draw", exact=True).click()
        expect(page.get_by_role("alert")).to_have_text("Shots must be a whole number from 1 to 64.")


@pytest.mark.parametrize(
    "drawn", [{}, [], {"task": 1, "seed": 1, "shots": 2}, {"task": "sst2", "seed": -1, "shots": 2}]
)
def test_a_linked_draw_that_is_none_is_left_out(browser: Any, address: str, model: Path, drawn: Any) -> None:
    document_ = document(model, drawn=drawn)
    document_["demos"][1]["label"] = 7
    encoded = base64.urlsafe_b64encode(json.dumps(document_).encode()).decode().rstrip("=")
    with watched(browser, address, path=f"/#s={encoded}") as page:
        flip = page.get_by_role("button", name="Label of demonstration 1:")
        assert flip.inner_text() == "no label"  # 7 is none of the two; which was meant cannot be told
        flip.click()
        assert flip.inner_text() == "Negative" and page.locator("#shots").input_value() == "8"
        run(page)


def test_one_layer_is_not_layers(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    facts = {"event": "loaded", "parameters": 1000, "layers": 1, "heads": 4, "dtype": "float32", "device": "cpu"}
    with watched(browser, address) as page:
        page.route("**/api/load", lambda route: route.fulfill(status=200, body=json.dumps(facts) + "\n"))
        page.reload()
        expect(page.locator("#model-note")).to_contain_text("1 layer of 4 heads")


def test_one_s_own_last_run_is_not_another(browser: Any, address: str) -> None:
    """The server may hear of the new run before it hears that the old one was left."""
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        page.locator("#auto").uncheck()
        page.evaluate("performance.now = () => 10_000")  # the page's clock stands still, however slow the machine
        queued = json.dumps({"event": "queued", "ahead": 1}) + "\n"
        page.route("**/api/answer", lambda route: None)  # a run that is under way …
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("button", name="Run again").wait_for()
        page.unroute("**/api/answer")
        page.route("**/api/answer", lambda route: route.fulfill(status=200, body=queued))
        page.get_by_role("button", name="Run again").click()  # … and left for another
        expect(page.locator("#stop")).to_be_hidden()
        assert page.locator("#status").inner_text() == "Asking …"
        page.evaluate("performance.now = () => 15_100")
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.locator("#status")).to_have_text("Waiting behind 1 other …")
