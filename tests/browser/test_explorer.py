"""The explorer in a real Chromium: a person types, runs, reorders and flips, and the numbers are the library's."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from browser.watched import fits, no_violations, watched
from dualview.comparison import compare
from dualview.explain import Explanation, explain
from dualview.models.loading import LanguageModel, load_model
from dualview.tasks.sampling import sample_demos, sample_queries
from dualview.tasks.task import load_task
from equivalence import tiny
from web.live import document, serving, shelf_of

DEMOS = [("the film was fine", 1), ("a dull story", 0), ("very warm and clever", 1)]
QUERY = "the plot was slow and very dull"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for two of the library's tasks: one field and two."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("sst2", "cb"):
        (folder / name).mkdir()
        for split, seed in (("train", 1), ("validation", 2)):
            rows = tiny.rows(12, seed)
            if name == "sst2":
                made = [{**row, "label": row["label"] % 2} for row in rows]
            else:
                made = [{"premise": row["text"], "hypothesis": "it was fine", "label": row["label"]} for row in rows]
            tiny.write_rows(folder / name / f"{split}.jsonl", made)
    return folder


@pytest.fixture(scope="module")
def address(model: Path, data: Path) -> Generator[str]:
    with serving(shelf_of(model, data=data)) as found:
        yield found


@pytest.fixture(scope="module")
def lm(model: Path) -> LanguageModel:
    return load_model(str(model), dtype="float64", device="cpu")


class Reference:
    """The same question put to the library, from files written here."""

    def __init__(self, lm: LanguageModel, folder: Path) -> None:
        self.lm, self.folder = lm, folder

    def _options(self, demos: Sequence[tuple[str, int]], query: str, lr: float) -> dict[str, Any]:
        tiny.write_rows(self.folder / "d.jsonl", [{"text": text, "label": label} for text, label in demos])
        tiny.write_rows(self.folder / "q.jsonl", [{"text": query, "label": 0}])
        task = {"name": "t", "template": "Review: {text} Sentiment:", "labels": ["Negative", "Positive"]}
        task |= {"train": "d.jsonl", "validation": "q.jsonl"}
        (self.folder / "t.yaml").write_text(yaml.safe_dump(task))
        return {"model": self.lm, "task": str(self.folder / "t.yaml"), "demos": self.folder / "d.jsonl", "lr": lr}

    def explain(self, demos: Sequence[tuple[str, int]], query: str = QUERY, lr: float = 0.05) -> Explanation:
        return explain(query=query, **self._options(demos, query, lr))

    def compare(self, demos: Sequence[tuple[str, int]], query: str = QUERY, lr: float = 0.05) -> dict[str, Any]:
        return compare(**self._options(demos, query, lr), queries=self.folder / "q.jsonl").to_json()


@pytest.fixture
def reference(lm: LanguageModel, tmp_path: Path) -> Reference:
    return Reference(lm, tmp_path)


def write_demos(page: Any) -> None:
    """As a person would: clear all, then type, add, type …"""
    page.get_by_role("button", name="Clear all").click()
    for number, (text, label) in enumerate(DEMOS, start=1):
        if number > 1:
            page.get_by_role("button", name="Add a demonstration").click()
        page.get_by_label(f"Demonstration {number}: text").fill(text)
        flip = page.get_by_role("button", name=f"Label of demonstration {number}:")
        if flip.inner_text() != ["Negative", "Positive"][label]:
            flip.click()
    page.get_by_label("Query: text").fill(QUERY)
    page.locator("#lr").fill("0.05")


def run(page: Any) -> None:
    from playwright.sync_api import expect

    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator("#status")).to_contain_text("Done in")


def numbers(page: Any) -> dict[str, list[str]]:
    """The probabilities on the page, as they are written there."""
    return {name: page.locator(f"#setting-{name} .value").all_inner_texts() for name in ("zsl", "icl", "ft")}


def expected(e: Explanation) -> dict[str, list[str]]:
    shares = {name: np.exp(scores) / np.exp(scores).sum() for name, scores in e.log_probs.items()}
    return {name: [f"{share:.3f}" for share in each] for name, each in shares.items()}


def settled(page: Any, wanted: dict[str, list[str]]) -> None:
    """The page runs again by itself after a change; in the end it shows these numbers."""
    from playwright.sync_api import expect

    for name, texts in wanted.items():
        expect(page.locator(f"#setting-{name} .value")).to_have_text(texts)
    expect(page.locator("#status")).to_contain_text("Done in")


def test_typing_running_reordering_flipping(browser: Any, address: str, reference: Reference) -> None:
    with watched(browser, address) as page:
        write_demos(page)
        run(page)
        first = expected(reference.explain(DEMOS))
        assert numbers(page) == first
        # by keyboard
        button = page.get_by_role("button", name="Move down demonstration 1")
        button.focus()
        page.keyboard.press("Enter")
        order = [DEMOS[1], DEMOS[0], DEMOS[2]]
        assert page.get_by_label("Demonstration 2: text").input_value() == DEMOS[0][0]
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Move down demonstration 2"
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
        assert [page.get_by_label(f"Demonstration {n}: text").input_value() for n in (1, 2, 3)] == [t for t, _ in order]
        settled(page, expected(reference.explain(order)))
        # flip a label
        page.get_by_role("button", name="Label of demonstration 1: Positive. Flip to Negative").click()
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
        assert f"“{token.text}” of demonstration 1" in said
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
        assert [page.get_by_label(f"Demonstration {n}: text").input_value() for n in (1, 2, 3)] == [t for t, _ in DEMOS]
        assert page.get_by_label("Query: text").input_value() == QUERY
        assert page.locator("#lr").input_value() == "0.05"
        assert page.locator("#settings").inner_text().count("Not asked yet.") == 3  # a link computes nothing by itself
        run(page)
        assert numbers(page) == expected(e)


@pytest.mark.parametrize("hash_", ["#s=%%%", "#s=bm8", "#s=e30", "#nothing", "#s=eyJkZW1vcyI6MX0"])
def test_broken_links_show_the_example(browser: Any, address: str, hash_: str) -> None:
    with watched(browser, address, path=f"/{hash_}") as page:
        assert "funny story" in page.get_by_label("Demonstration 1: text").input_value()


def test_drawing_from_tasks(browser: Any, address: str, data: Path) -> None:
    from playwright.sync_api import expect

    task = load_task("sst2", data)

    def drawn(seed: int) -> None:
        for number, row in enumerate(sample_demos(task, seed, 3), start=1):
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
        expect(page.get_by_label("Demonstration 1: hypothesis")).to_have_value("it was fine")
        seen = set()
        for _ in range(3):
            flip = page.get_by_role("button", name="Label of demonstration 1:")
            seen.add(flip.inner_text())
            flip.click()
        assert seen == {"True", "False", "Neither"}


def test_markup_is_text(browser: Any, address: str) -> None:
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
    with watched(browser, address) as page:
        write_demos(page)
        page.get_by_label("Demonstration 1: text").fill(evil)
        page.get_by_label("Query: text").fill(evil)
        page.locator("#wording > summary").click()
        page.get_by_label("Label 1", exact=True).fill(f"Negative {evil}")
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
        page.get_by_label("Label 1", exact=True).fill("Positive")
        # The browser itself would write a status of 400 to the console, so the refusal comes as an event.
        page.route(
            "**/api/answer",
            lambda route: route.fulfill(status=200, body='{"event":"error","error":"Labels differ."}\n'),
        )
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.get_by_role("alert")).to_have_text("Labels differ.")
        page.unroute("**/api/answer")
        page.get_by_label("Label 1", exact=True).fill("Negative")
        run(page)
        expect(page.locator("#error")).to_be_hidden()


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
        page.get_by_label("Label 3", exact=True).fill("Neither")
        flip = page.get_by_role("button", name="Label of demonstration 1:")
        flip.click()
        assert flip.inner_text() == "Neither"
        page.get_by_role("button", name="Remove label 3").click()
        expect(page.get_by_role("alert")).to_have_text(
            "The label “Neither” is that of demonstration 1; choose another there before you remove it."
        )
        assert page.locator("#labels input").count() == 3 and flip.inner_text() == "Neither"
        page.get_by_role("button", name="Remove label 1").click()
        expect(page.get_by_role("alert")).to_contain_text("demonstration 2")
        flip.click()
        page.get_by_role("button", name="Remove label 3").click()
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
        flip = page.get_by_role("button", name="Label of demonstration 2:")
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
        queued = json.dumps({"event": "queued", "ahead": 1}) + "\n"
        page.route("**/api/answer", lambda route: None)  # a run that is under way …
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("button", name="Run again").wait_for()
        page.unroute("**/api/answer")
        page.route("**/api/answer", lambda route: route.fulfill(status=200, body=queued))
        page.get_by_role("button", name="Run again").click()  # … and left for another
        expect(page.locator("#stop")).to_be_hidden()
        assert page.locator("#status").inner_text() == "Asking …"
        page.wait_for_timeout(5100)
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.locator("#status")).to_have_text("Waiting behind 1 other …")
