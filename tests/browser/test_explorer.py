"""The explorer in a real Chromium: a person types, runs, reorders and flips, and the numbers are the library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from browser.explorer import DEMOS, QUERY, Reference, expected, numbers, run, settled, write_demos
from browser.watched import no_violations, watched
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import load_task


def test_typing_running_reordering_flipping(browser: Any, address: str, reference: Reference) -> None:
    with watched(browser, address) as page:
        write_demos(page)
        run(page)
        first = expected(reference.explain(DEMOS))
        assert numbers(page) == first
        # by keyboard
        button = page.get_by_role("button", name="Move down demonstration 0")
        button.focus()
        page.keyboard.press("Enter")
        order = [DEMOS[1], DEMOS[0], DEMOS[2]]
        assert page.get_by_label("Demonstration 1: text").input_value() == DEMOS[0][0]
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Move down demonstration 1"
        second = expected(reference.explain(order))
        assert second != first
        settled(page, second)
        assert "change since the last run" in page.locator("#answers").inner_text()
        # by dragging the last one to the top
        grip = page.locator("#demos li").nth(2).locator(".grip").bounding_box()
        top = page.locator("#demos li").nth(0).bounding_box()
        page.mouse.move(grip["x"] + 5, grip["y"] + 5)
        page.mouse.down()
        page.mouse.move(grip["x"] + 5, grip["y"] - 20, steps=3)
        page.mouse.move(top["x"] + 5, top["y"] + 2, steps=8)
        page.mouse.up()
        order = [order[2], order[0], order[1]]
        assert [page.get_by_label(f"Demonstration {n}: text").input_value() for n in (0, 1, 2)] == [t for t, _ in order]
        settled(page, expected(reference.explain(order)))
        # flip a label
        page.get_by_role("button", name="Label of demonstration 0: Positive. Flip to Negative").click()
        order = [(order[0][0], 0), *order[1:]]
        settled(page, expected(reference.explain(order)))
        # another learning rate
        page.locator("#lr").fill("0.2")
        settled(page, expected(reference.explain(order, lr=0.2)))


def test_steps_layers_attention_and_prompt_are_the_library_s(
    browser: Any, address: str, reference: Reference, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        write_demos(page)
        run(page)
        e, result = reference.explain(DEMOS), reference.compare(DEMOS)
        for chart, values, digits in (
            ("#aou-chart", result["sim_aou"]["raw_per_layer"], 3),
            ("#am-chart", result["sim_am"]["delta_per_layer"], 3),
            ("#loss-chart", result["ft"]["losses"], 3),
            ("#contrast-chart", result["label_contrast"]["per_layer"], 3),
        ):
            page.locator(f"{chart} summary").click()
            wanted = ["" if v is None else f"{v:.{digits}f}".replace("-", "−") for v in values]
            expect(page.locator(f"{chart} tbody tr td:nth-child(2)")).to_have_text(wanted)
        page.locator("#layer").select_option("1")
        page.locator("#head").select_option("2")
        strip = page.get_by_role("group", name="in-context mass of every token")
        strip.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        said = page.locator("#readout").inner_text()
        token = e.tokens[1]
        assert f"“{token.text}” of demonstration 0" in said
        assert f"in-context mass {float(e.icl_mass[1, 2, 1]):.4f}" in said
        page.locator("#layer").select_option("all")
        page.keyboard.press("Tab")
        strip.focus()
        page.keyboard.press("End")
        last = e.tokens[-1]
        assert f"in-context mass {last.icl:.4f}" in page.locator("#readout").inner_text()
        assert f"fine-tuning share {last.ft_v:+.4f}".replace("-0.0000", "+0.0000") in page.locator(
            "#readout"
        ).inner_text().replace("−", "-").replace("-0.0000", "+0.0000")
        tokens = page.locator("#prompt .toks .tok-query").all_inner_texts()
        assert tokens == ["Review:", *QUERY.split(), "Sentiment:"]


def test_what_the_labels_teach(browser: Any, address: str, reference: Reference) -> None:
    """The bars are the log-odds of prompts with true and with flipped labels; a query that nothing moves says so."""
    from playwright.sync_api import expect

    flipped = [(text, 1 - label) for text, label in DEMOS]
    sides = [reference.explain(demos).log_probs for demos in (DEMOS, flipped)]
    with watched(browser, address) as page:
        card = page.locator("#contrast-card")
        expect(card).to_contain_text("Run it to see what flipping the labels changes.")
        write_demos(page)
        run(page)
        expect(page.locator("#odds-chart")).to_contain_text("Log-odds of “Positive”")
        page.locator("#odds-chart summary").click()
        for number, name in enumerate(("icl", "ft")):
            odds = [(side[name][1] - side[name][0]) / 2 for side in sides]
            wanted = [f"{value:.3f}".replace("-", "−") for value in odds]
            row = page.locator("#odds-chart tbody tr").nth(number)
            expect(row.locator("td")).to_have_text(wanted)
        for chart in ("#contrast-chart", "#contrast-size-chart", "#odds-chart"):
            page.locator(f"{chart} .chart-plot").focus()
            page.keyboard.press("ArrowRight")
            expect(page.locator(f"{chart} .chart-tip")).to_be_visible()
        expect(page.locator("#contrast-reason")).to_be_hidden()
        page.locator("#lr").fill("0")
        expect(page.locator("#contrast-reason")).to_contain_text("changes nothing in the fine-tuned model")
        no_violations(page)


def test_the_link_the_download_and_the_command(browser: Any, address: str, reference: Reference) -> None:
    with watched(browser, address) as page:
        write_demos(page)
        run(page)
        page.get_by_role("button", name="Copy a link to this state").click()
        link = page.evaluate("navigator.clipboard.readText()")
        assert link.startswith(f"{address}/#s=")
        with page.expect_download() as download:
            page.get_by_role("button", name="Download the numbers").click()
        content = json.loads(Path(download.value.path()).read_text())
        e = reference.explain(DEMOS)
        assert content["schema"] == "dualview.explorer/1" and content["state"]["lr"] == 0.05
        for name, scores in e.log_probs.items():
            assert content["settings"][name]["log_probs"] == pytest.approx(scores, abs=1e-12)
        assert len(content["steps"]) == 2 and content["similarity"]["sim_aou"] and content["attention"]["icl"]
        page.get_by_role("button", name="Copy: Probabilities").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        command = content["prompt"]["commands"][0]
        assert copied == command["files"] + command["line"]
        assert command["line"] in page.locator("#commands").inner_text()
        assert f"--query '{QUERY}'" in command["line"] and DEMOS[0][0] in command["files"]
    with watched(browser, address, path=link.removeprefix(address)) as page:
        assert [page.get_by_label(f"Demonstration {n}: text").input_value() for n in (0, 1, 2)] == [t for t, _ in DEMOS]
        assert page.get_by_label("Query: text").input_value() == QUERY
        assert page.locator("#lr").input_value() == "0.05"
        assert page.locator("#settings").inner_text().count("Not asked yet.") == 3  # a link computes nothing by itself
        run(page)
        assert numbers(page) == expected(e)


@pytest.mark.parametrize("hash_", ["#s=%%%", "#s=bm8", "#s=e30", "#nothing", "#s=eyJkZW1vcyI6MX0"])
def test_broken_links_show_the_example(browser: Any, address: str, hash_: str) -> None:
    with watched(browser, address, path=f"/{hash_}") as page:
        assert "funny story" in page.get_by_label("Demonstration 0: text").input_value()


def test_drawing_from_tasks(browser: Any, address: str, data: Path) -> None:
    from playwright.sync_api import expect

    task = load_task("sst2", data)

    def drawn(seed: int) -> None:
        for number, row in enumerate(sample_demos(task, seed, 3)):
            expect(page.get_by_label(f"Demonstration {number}: sentence")).to_have_value(row.fields["sentence"])
            label = page.get_by_role("button", name=f"Label of demonstration {number}:")
            assert label.inner_text() == task.labels[row.label]
        expect(page.locator("#demos li")).to_have_count(3)

    with watched(browser, address) as page:
        page.locator("#shots").fill("3")
        page.locator("#task").select_option("sst2")
        drawn(1)
        queries = [row.fields["sentence"] for row in sample_queries(task, 2)]
        expect(page.get_by_label("Query: sentence")).to_have_value(queries[0])
        run(page)
        assert "--seed 1 --shots 3" in page.locator("#commands").inner_text()
        page.get_by_role("button", name="Another of the task").click()
        expect(page.get_by_label("Query: sentence")).to_have_value(queries[1])
        page.locator("#seed").fill("2")
        page.get_by_role("button", name="Draw", exact=True).click()
        drawn(2)
        page.locator("#task").select_option("cb")
        expect(page.get_by_label("Demonstration 0: hypothesis")).to_have_value("it was fine")
        seen = set()
        for _ in range(3):
            flip = page.get_by_role("button", name="Label of demonstration 0:")
            seen.add(flip.inner_text())
            flip.click()
        assert seen == {"True", "False", "Neither"}


def test_markup_is_text(browser: Any, address: str) -> None:
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
    with watched(browser, address) as page:
        write_demos(page)
        page.get_by_label("Demonstration 0: text").fill(evil)
        page.get_by_label("Query: text").fill(evil)
        page.locator("#wording > summary").click()
        page.get_by_label("Label 0", exact=True).fill(f"Negative {evil}")
        page.get_by_label("Template: what the model reads").fill(f"{evil} {{text}} Sentiment:")
        run(page)
        assert evil in page.locator("#commands").inner_text() or "img src" in page.locator("#commands").inner_text()
        assert page.locator("#settings").inner_text().count(evil) == 3
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.hacked") is None


def test_mistakes_are_said(browser: Any, address: str) -> None:
    from playwright.sync_api import expect

    with watched(browser, address) as page:
        page.locator("#wording > summary").click()
        page.get_by_label("Label 0", exact=True).fill("Positive")
        # The browser itself would write a status of 400 to the console, so the refusal comes as an event.
        page.route(
            "**/api/answer",
            lambda route: route.fulfill(status=200, body='{"event":"error","error":"Labels differ."}\n'),
        )
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.get_by_role("alert")).to_have_text("Labels differ.")
        page.unroute("**/api/answer")
        page.get_by_label("Label 0", exact=True).fill("Negative")
        run(page)
        expect(page.locator("#error")).to_be_hidden()
