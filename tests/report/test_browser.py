"""The report in a real Chromium: it draws, filters, shows tokens, answers to the keyboard, and runs no other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from browser.watched import fits, no_violations, watched
from dualview.report.html.page import render_page
from dualview.report.html.run import write_report
from dualview.report.html.store import store_report
from report.made import Bend, TinyRun
from report.test_figures import with_kendall_layers, with_norms
from report.test_html import HOSTILE, hostile, hostile_prompts
from report.test_store_report import planted


@pytest.fixture(scope="module")
def folder(run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's report and a store's, side by side."""
    made = tmp_path_factory.mktemp("pages")
    content = run.result.to_json()
    with_kendall_layers(content)
    with_norms(content)
    result = type(run.result).model_validate(content)
    write_report(result, made / "run.html", records=run.records)
    store_report(planted(run.result), made / "store.html")
    return made


def open_all(page: Any) -> None:
    """Every part that is folded away, the charts' tables among them."""
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.wait_for_function("document.querySelectorAll('.chart-values table').length > 0")


@pytest.mark.parametrize("name", ["run", "store"])
@pytest.mark.parametrize(("size", "scheme"), [("phone", "dark"), ("desktop", "light")])
def test_it_can_be_read_by_anyone(browser: Any, folder: Path, name: str, size: str, scheme: str) -> None:
    with watched(browser, folder.as_uri(), size=size, scheme=scheme, path=f"/{name}.html") as page:
        assert page.locator("[data-chart] svg[role=img]").count() == page.locator("[data-chart]").count() > 3
        assert fits(page)
        open_all(page)
        assert fits(page)
        no_violations(page)


def test_values_by_pointer_and_by_keyboard(browser: Any, folder: Path, run: TinyRun) -> None:
    with watched(browser, folder.as_uri(), path="/run.html") as page:
        plot = page.locator("[data-chart='0'] .chart-plot")
        tip = plot.locator(".chart-tip")
        assert tip.inner_text() == ""
        plot.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        said = tip.inner_text()
        assert "in-context" in said and _shown(run.result.accuracy.icl) in said
        page.keyboard.press("End")
        assert "fine-tuned" in tip.inner_text()
        page.keyboard.press("Escape")
        assert tip.inner_text() == ""
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
        assert "zero-shot" in tip.inner_text() and _shown(run.result.accuracy.zsl) in tip.inner_text()
        table = page.locator("[data-chart='0'] details")
        table.locator("summary").click()
        assert _shown(run.result.accuracy.ft) in table.locator("table").inner_text()


def _shown(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3f}"


def test_heat_map_cells_go_in_four_directions(browser: Any, folder: Path, run: TinyRun) -> None:
    mass = run.result.to_json()["demo_mass"]["per_head"]
    with watched(browser, folder.as_uri(), path="/run.html") as page:
        chart = page.locator("[data-chart]", has_text="λ: softmax mass")
        chart.locator(".chart-plot").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        said = chart.locator(".chart-tip").inner_text()
        assert "layer 1, head 1" in said and _shown(mass[1][1]) in said


def test_charts_are_drawn_again_when_the_window_changes(browser: Any, folder: Path) -> None:
    with watched(browser, folder.as_uri(), path="/run.html") as page:
        svg = page.locator("[data-chart='1'] svg[role=img]")
        before = svg.get_attribute("viewBox")
        page.set_viewport_size({"width": 420, "height": 800})
        page.wait_for_function(
            "b => document.querySelector(\"[data-chart='1'] svg[role=img]\").getAttribute('viewBox') != b", arg=before
        )
        assert fits(page)


def test_queries_are_filtered_by_text_and_by_who_is_right(browser: Any, folder: Path, run: TinyRun) -> None:
    with watched(browser, folder.as_uri(), path="/run.html") as page:
        rows = page.locator("#query-rows > tr")
        patterns = [row.get_attribute("data-right") for row in rows.all()]
        texts = [row.inner_text().lower() for row in rows.all()]
        visible = page.locator("#query-rows > tr:visible")
        assert visible.count() == len(patterns) == 20
        filters = page.get_by_role("search")
        filters.get_by_label("zero-shot").select_option("wrong")
        filters.get_by_label("in-context").select_option("right")
        wanted = [p for p in patterns if p[0] == "0" and p[1] == "1"]
        assert visible.count() == len(wanted)
        assert page.locator("#filter-count").inner_text() == f"{len(wanted)} of 20 queries"
        page.get_by_role("button", name="Reset").press("Enter")
        assert visible.count() == 20
        page.get_by_label("text", exact=True).fill("Plot")
        assert visible.count() == sum("plot" in text for text in texts)
        page.locator("[data-pattern]").first.press("Enter")
        pattern = page.locator("[data-pattern]").first.get_attribute("data-pattern")
        assert visible.count() == patterns.count(pattern)


def test_any_query_s_prompt_can_be_read_token_by_token(browser: Any, folder: Path, run: TinyRun) -> None:
    with watched(browser, folder.as_uri(), path="/run.html") as page:
        labels = run.result.to_json()["task"]["labels"]
        prefix = page.locator("#prompt-prefix .tok")
        assert page.locator("#prompt-prefix .tok-label").count() >= 5 and prefix.first.inner_text() == "<s>"
        page.locator("[data-query='6']").press("Enter")
        assert page.get_by_label("query", exact=True).input_value() == "6"
        asked = page.locator("#prompt-query .tok")
        assert asked.first.inner_text() == "Review:" and "position" in asked.first.get_attribute("title")
        scores = run.result.queries[6]
        table = page.locator("#prompt-candidates")
        assert f"{scores.icl[1]:.3f}".replace("-", "−") in table.inner_text()
        right = table.locator("tr", has_text="right").inner_text()
        assert labels[scores.gold].split()[0] in right
        page.get_by_role("button", name="Next").click()
        assert page.get_by_label("query", exact=True).input_value() == "7"
        page.get_by_label("query", exact=True).fill("9999")
        page.keyboard.press("Tab")
        assert page.get_by_label("query", exact=True).input_value() == "19"


def test_the_theme_can_be_turned(browser: Any, folder: Path) -> None:
    with watched(browser, folder.as_uri(), path="/run.html") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(ground) != light
        no_violations(page)
        page.emulate_media(media="print")
        assert page.evaluate(ground) == "rgb(255, 255, 255)" and not page.locator("#theme").is_visible()


def test_hostile_text_is_inert(browser: Any, run: TinyRun, bend: Bend, tmp_path: Path) -> None:
    write_report(bend(hostile), tmp_path / "run.html", records=run.records, prompts=hostile_prompts(run))
    store_report([bend(hostile)], tmp_path / "store.html", title=HOSTILE)
    for name in ("run", "store"):
        with watched(browser, tmp_path.as_uri(), path=f"/{name}.html") as page:
            for plot in page.locator(".chart-plot").all():
                plot.focus()
                page.keyboard.press("ArrowRight")
            open_all(page)
            assert page.evaluate("window.hacked === undefined") and page.locator("img").count() == 0
            assert HOSTILE in page.locator("h1").inner_text()


def test_the_policy_stops_what_should_ever_get_in(browser: Any, tmp_path: Path) -> None:
    planted_text = Markup("<script>window.hacked = 1</script><img src='http://127.0.0.1:9/x'>")
    made = render_page("page.html", "t", {"charts": [], "prompts": None}, body=planted_text)
    (tmp_path / "page.html").write_text(made, encoding="utf-8")
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("window.hacked === undefined")
    assert len([text for text in said if "Content Security Policy" in text]) == 2
    page.close()


def test_nothing_is_drawn_beyond_the_plot(browser: Any, tmp_path: Path) -> None:
    """Whiskers and bands that go on end at the plot's edge, a whisker in an arrow; ticks of layers are whole."""
    bars = {"groups": ["a"], "series": [{"name": "s", "values": [0.5], "lo": [-3.0], "hi": [0.8]}]}
    bars |= {"title": "bars", "y": {"label": "y", "min": 0, "max": 1}}
    wide = [{"name": "s", "x": list(range(30)), "values": [0.1 + 0.001 * i for i in range(30)]}]
    wide[0] |= {"lo": [-50.0] * 30, "hi": [50.0] * 30}
    lines = {"title": "lines", "x": {"label": "layer", "values": []}, "y": {"label": "y"}, "series": wide}
    body = Markup('<div data-chart="0"></div><div data-chart="1"></div>')
    charts = [{"kind": "bars", "spec": bars}, {"kind": "lines", "spec": lines}]
    (tmp_path / "x.html").write_text(
        render_page("page.html", "x", {"charts": charts, "prompts": None}, body=body), encoding="utf-8"
    )
    inside = """(chart) => {
      const svg = chart.querySelector("svg[role=img]");
      const clips = [...svg.querySelectorAll("g[clip-path]")];
      const frame = svg.getBoundingClientRect();
      const cut = clips.map((g) => svg.querySelector(g.getAttribute("clip-path").slice(4, -1) + " rect").getBBox());
      return clips.length > 0 && cut.every((box) => box.y >= 0 && box.y + box.height <= frame.height)
        && [...svg.querySelectorAll("path")].every((path) => path.closest("g[clip-path], pattern"));
    }"""
    with watched(browser, tmp_path.as_uri(), path="/x.html") as page:
        for number in (0, 1):
            assert page.locator(f"[data-chart='{number}']").evaluate(inside)
        whisker = page.locator("[data-chart='0'] .whisker")
        assert whisker.get_attribute("d").count("L") == 2  # one arrow, one cap
        box = whisker.evaluate("(path) => { const b = path.getBBox(); return [b.y, b.y + b.height]; }")
        assert box[0] >= 0 and box[1] <= 310
        ticks = page.locator("[data-chart='1'] svg text[text-anchor=middle]").all_text_contents()
        assert ticks[-1] == "layer" and all(float(tick).is_integer() for tick in ticks[:-1])
        assert page.locator("[data-chart='1'] svg text[text-anchor=end]").first.text_content() != "−40"
