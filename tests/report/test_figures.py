"""Figures show the numbers they were given, say what was run, and come out the same each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from dualview.comparison.result import Result
from dualview.io.errors import UserError
from dualview.report.figures import run as figures
from dualview.report.figures.curves import Curve, curves
from dualview.report.figures.explanation import attention
from dualview.report.figures.style import CYCLE, SETTINGS, save
from report.made import Bend, TinyRun, unrecorded


def text_of(figure: Figure) -> str:
    """All text of a figure, the line breaks of its small print taken back."""
    found = [figure.get_suptitle(), figure.get_supxlabel()]
    for axes in figure.axes:
        found += [axes.get_xlabel(), axes.get_ylabel(), *(t.get_text() for t in axes.texts)]
        found += [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        if (legend := axes.get_legend()) is not None:
            found += [t.get_text() for t in legend.get_texts()]
    return " ".join(found).replace("\n", " ")


def on_mr(content: dict[str, Any]) -> None:
    content["task"]["name"] = "mr"


def with_kendall_layers(content: dict[str, Any]) -> None:
    on_mr(content)
    for i, form in enumerate(("dual_v", "dual_v_lr0", "dual_k", "released", "released_lr0")):
        content["kendall"][form]["tau_token_per_layer"] = [0.1 * i, None, 0.2 - 0.1 * i]


def with_norms(content: dict[str, Any]) -> None:
    content["norm_curve"] = [
        {
            "rule": rule,
            "lr": lr,
            "status": "collapsed" if lr > 0.1 else "ok",
            "accuracy": 0.5,
            "update_norm": lr * scale,
            "sim_aou_raw": 0.1 * scale,
            "sim_aou_normalised": 0.2,
            "sim_am_delta": None if lr < 0.01 else 0.3,
            "queries": 20,
        }
        for rule, scale in (("sgd", 3.0), ("layer-causal", 7.0))
        for lr in (0.001, 0.01, 0.1, 0.3)
    ]


def explained(shots: int = 3) -> dict[str, Any]:
    parts = [
        {"text": f"Review: text {i} $x$", "label": "Negative", "icl": 0.1 * i, "ft_v": 0.2 - 0.1 * i, "ft_k": 0.05 * i}
        for i in range(shots)
    ]
    return {"query": "a story", "model": "m", "task": "t", "lr": 0.01, "demos": parts, "tau": {"demo": -0.3}}


def every_figure(run: TinyRun, bend: Bend) -> dict[str, Figure]:
    def everything(content: dict[str, Any]) -> None:
        with_kendall_layers(content)
        with_norms(content)

    found = dict(figures.run_figures(bend(everything), run.records))
    return {**found, "attention": attention(explained())}


def test_every_figure_says_what_was_run(run: TinyRun, bend: Bend) -> None:
    found = every_figure(run, bend)
    assert set(found) == {"accuracy", "sim_aou", "sim_am", "demo_mass", "norm_curve", "kendall", "attention"}
    for name, figure in found.items():
        said = text_of(figure)
        if name == "attention":
            assert "m on t" in said and "lr 0.01" in said
        else:
            assert run.result.provenance.model in said.replace(" ", "").replace("\\", "") or "model" in said
            for part in ("on mr", "5 demonstrations (seed 1)", "20 queries", "lr 0.05"):
                assert part in said, (name, part)
        for axes in figure.axes:
            assert axes.get_xlabel() or axes.get_ylabel() or axes.get_shared_x_axes(), name


def test_accuracy_bars_are_the_accuracies(bend: Bend) -> None:
    result = bend(on_mr)
    axes = figures.accuracy(result).axes[0]
    heights = [bar.get_height() for bar in axes.patches]  # pyright: ignore[reportAttributeAccessIssue]
    assert heights == [result.accuracy.zsl, result.accuracy.icl, result.accuracy.ft]
    papers = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}  # pyright: ignore
    assert papers["Dai et al., 1.3B"] == [0.659, 0.890, 0.730]
    # Wilson's interval solves |p - a| = z sqrt(a (1 - a) / n).
    bars = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    whiskers = [segment for bar in bars for segment in bar.lines[2][0].get_segments()]
    for share, segment in zip(heights, whiskers, strict=True):
        for end in segment[:, 1]:
            assert abs(share - end) == pytest.approx(1.959964 * (end * (1 - end) / 20) ** 0.5, abs=1e-6)


def test_boxes_are_the_quantiles_and_the_papers_are_drawn(run: TinyRun, bend: Bend) -> None:
    from dualview.report.charts.profiles import profiles

    result = bend(on_mr)
    raw = next(p for p in profiles(result, run.records) if p.metric.key == "sim_aou.raw")
    axes = figures.sim_aou(result, run.records).axes[0]
    assert raw.quantiles is not None
    medians = [line for line in axes.lines if line.get_color() == "#D55E00"]
    assert [line.get_ydata()[0] for line in medians] == pytest.approx(list(raw.quantiles["q50"]))  # pyright: ignore
    labels = {str(line.get_label()): line for line in axes.lines}
    assert list(labels["Deutch et al., 1.3B"].get_ydata()) == [0.17, 0.17]  # pyright: ignore
    ceiling = labels["ceiling"].get_ydata()
    assert list(ceiling)[:-1] == pytest.approx(list(raw.ceiling))  # pyright: ignore
    assert "up to the highest floor" in text_of(axes.figure)  # pyright: ignore


def test_demo_mass_is_drawn_head_by_head(run: TinyRun) -> None:
    figure = figures.demo_mass(run.result)
    mass = run.result.to_json()["demo_mass"]
    assert figure.axes[0].images[0].get_array().tolist() == mass["per_head"]  # pyright: ignore
    assert list(figure.axes[1].lines[0].get_xdata()) == mass["per_layer"]  # pyright: ignore


def test_norm_curve_joins_each_rule_in_order_of_size(bend: Bend) -> None:
    axes = figures.norm_curve(bend(with_norms)).axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines["sgd"].get_xdata()) == pytest.approx([0.003, 0.03, 0.3, 0.9])  # pyright: ignore
    crossed = [line for line in axes.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crossed] == [pytest.approx([0.9]), pytest.approx([2.1])]  # pyright: ignore


def test_kendall_has_its_controls_and_the_papers(bend: Bend) -> None:
    axes = figures.kendall(bend(with_kendall_layers)).axes[0]
    lines = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}  # pyright: ignore
    assert lines["W_V at lr 0"][0] == 0.1 and lines["W_V at lr 0"][1] != lines["W_V at lr 0"][1]  # a gap
    assert lines["Dai et al., 1.3B"] == [0.173, 0.173]


def test_attention_shows_both_sides(run: TinyRun) -> None:
    left, right = attention(explained()).axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([0.0, 0.1, 0.2])  # pyright: ignore
    assert [bar.get_width() for bar in right.patches[:3]] == pytest.approx([0.2, 0.1, 0.0])  # pyright: ignore
    assert [bar.get_width() for bar in right.patches[3:]] == pytest.approx([0.0, 0.05, 0.1])  # pyright: ignore
    for part in ({"demos": []}, [], {"query": "only"}):
        with pytest.raises(UserError, match="not an explanation"):
            attention(part)


def test_curves_have_bands_and_references() -> None:
    figure = curves(
        {"a": Curve([1, 2], [3.0, None], [2.0, 2.0], [4.0, 4.0]), "b_$1$": Curve([1, 2], [1.0, 1.0])},
        "t",
        "step",
        "loss",
        "small print",
        references={"closed form": 0.2},
        log_y=True,
    )
    axes = figure.axes[0]
    assert len(axes.collections) == 1 and axes.get_yscale() == "log"
    assert list(axes.lines[2].get_ydata()) == [0.2, 0.2] and "closed form" in text_of(figure)  # pyright: ignore


def test_what_a_result_lacks_is_said(bend: Bend) -> None:
    def bare(content: dict[str, Any]) -> None:
        for key in ("controls", "verdict", "kendall", "demo_mass"):
            content.pop(key)
        for part in ("sim_aou", "sim_am"):
            content[part] = unrecorded(content[part])

    result = bend(bare)
    assert set(figures.run_figures(result)) == {"accuracy"}
    for draw in (figures.sim_aou, figures.sim_am, figures.demo_mass, figures.norm_curve, figures.kendall):
        with pytest.raises(UserError):
            draw(result)


def test_layers_without_a_value_are_gaps(run: TinyRun, bend: Bend, tmp_path: Path) -> None:
    def gap(content: dict[str, Any]) -> None:
        content["sim_am"]["delta_per_layer"][0] = None
        content["controls"]["sim_am"]["floors"] = {"gaussian": None}

    save(figures.sim_am(bend(gap)), tmp_path / "gap.svg")


def test_every_figure_can_be_written(run: TinyRun, bend: Bend, tmp_path: Path) -> None:
    for name, figure in every_figure(run, bend).items():
        (path,) = save(figure, tmp_path / f"{name}.svg")
        assert "<svg" in path.read_text(encoding="utf-8")


def test_the_same_figure_gives_the_same_bytes(run: TinyRun, tmp_path: Path) -> None:
    for folder in ("once", "again"):
        paths = save(figures.sim_aou(run.result, run.records), tmp_path / folder / "figure")
        assert [path.suffix for path in paths] == [".pdf", ".svg", ".png"]
    pdf, svg, png = (
        [tmp_path / folder / f"figure.{kind}" for folder in ("once", "again")] for kind in ("pdf", "svg", "png")
    )
    for pair in (pdf, svg, png):
        assert pair[0].read_bytes() == pair[1].read_bytes()
    assert pdf[0].read_bytes().startswith(b"%PDF") and b"CreationDate" not in pdf[0].read_bytes()
    assert b"<dc:date>" not in svg[0].read_bytes() and png[0].read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_written_leaves_nothing(run: TinyRun, tmp_path: Path) -> None:
    figure = figures.accuracy(run.result)
    with pytest.raises(UserError, match="pdf, svg or png"):
        save(figure, tmp_path / "figure.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(figure, tmp_path / "file" / "figure.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_name_with_signs_of_its_own_is_drawn(bend: Bend, tmp_path: Path) -> None:
    def named(content: dict[str, Any]) -> None:
        content["provenance"]["model"] = r"a$b_c$\frac{d <e> & {f}^%"
        content["task"]["name"] = "t$1$"

    result: Result = bend(named)
    save(figures.accuracy(result), tmp_path / "named")
    assert "a$b_c$" in (tmp_path / "named.svg").read_text(encoding="utf-8").replace("\\$", "$")


def test_looks_differ_without_colour() -> None:
    assert len({look.marker for look in CYCLE}) == len(CYCLE) == len({str(look.line) for look in CYCLE})
    assert len({look.hatch for look in SETTINGS.values()}) == 3


def test_no_global_state_is_touched() -> None:
    code = "import sys, dualview.report.figures.run; print(sorted({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120).stdout == b"[]\n"


def test_a_similarity_that_is_undefined_throughout_leaves_its_panel_empty(bend: Bend) -> None:
    """SimAM of a one-layer rotary model has no value at any rate; the others are drawn all the same."""

    def one_layer(content: dict[str, Any]) -> None:
        with_norms(content)
        for point in content["norm_curve"]:
            point["sim_am_delta"] = None

    raw, _, delta = figures.norm_curve(bend(one_layer)).axes
    assert len([line for line in raw.lines if line.get_label() in ("sgd", "layer-causal")]) == 2
    assert not [line for line in delta.lines if line.get_label() in ("sgd", "layer-causal")]
    assert [text.get_text() for text in delta.texts] == ["undefined"]


def test_whole_numbers_have_whole_ticks() -> None:
    figure = curves({"a": Curve([0, 1], [0.1, 0.2]), "b": Curve([0, 1], [0.3, 0.1])}, "t", "layer", "y", "")
    figure.canvas.draw()
    ticks = [float(tick) for tick in figure.axes[0].get_xticks()]
    assert ticks and all(tick.is_integer() for tick in ticks)
    halves = curves({"a": Curve([0.0, 0.5], [0.1, 0.2])}, "t", "share", "y", "").axes[0].get_xticks()
    assert not all(float(tick).is_integer() for tick in halves)


def test_an_explanation_s_figure_says_how_many_and_which_seed() -> None:
    assert "3 demonstrations, n = 1 query" in text_of(attention(explained()))
    assert "3 demonstrations (seed 7), n = 1 query" in text_of(attention({**explained(), "seed": 7}))
