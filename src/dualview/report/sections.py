"""The parts of a run's report: verdict, numbers with their controls, charts, fine-tuning, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualview.comparison.result import Provenance, Result
from dualview.metrics.controls import ROLES
from dualview.report.catalogue import EMBEDDED, NUMBERS, Number, at, beside, bounds, how_tuned, present, shown, what_ran
from dualview.report.chart_data import accuracies
from dualview.report.charts import Chart
from dualview.report.page import Markup, join, table, tag
from dualview.report.published import published
from dualview.report.repro_command import command_of

_RECORD_FLOORS = {
    "chance": "ICL of the same accuracy, its fixes unrelated to fine-tuning's",
    "gaussian": "fine-tuning's update replaced by a random one of the same size",
    "shuffled_query": "fine-tuning's update of another query",
    "mean_direction": "the part owed to the mean update over queries",
    "rotated": "fine-tuning's own updates, turned at random",
    "zsl_direction": "the part owed to the zero-shot vector's direction",
    "noise": "what random updates of these sizes give once outputs are normalised",
    "before": "the map before fine-tuning",
    "untrained": "the same on an untrained model",
    "untrained_but_embeddings": "the same on a model untrained but for embeddings and norms",
}


def page_header(title: str, said: Sequence[str], contents: Mapping[str, str]) -> Markup:
    """The report's heading, with a way to every part and to the other theme."""
    links = tag("ul", *(tag("li", tag("a", text, href=f"#{name}")) for name, text in contents.items()))
    return tag(
        "header",
        tag(
            "div",
            tag("span", "dualview report", class_="muted small"),
            tag("button", "Light or dark", id="theme", type="button", class_="push no-print"),
            class_="bar",
        ),
        tag("h1", title),
        *(tag("p", line, class_="muted") for line in said),
        tag("nav", links, class_="contents no-print", aria_label="Contents"),
    )


def section(name: str, title: str, *content: object) -> Markup:
    return tag("section", tag("h2", title, id=f"{name}-title"), *content, id=name, aria_labelledby=f"{name}-title")


def run_title(result: Result) -> str:
    return f"{result.provenance.model} on {result.task.name}"


def run_lines(result: Result) -> list[str]:
    content = result.to_json()
    lines = [what_ran(content), f"fine-tuning: {how_tuned(content)}"]
    return [*lines, EMBEDDED] if result.provenance.model == "embedded" else lines


# ----------------------------------------------------------------------------------------------------------- verdict


def verdict_card(result: Result) -> Markup:
    """The verdict first: the word, the sentence, which conditions hold, what it cannot say, and every warning."""
    verdict = at(result.to_json(), "verdict")
    if verdict is None:
        said = "No verdict: this run was made without controls, so nothing below has a floor to be held against."
        return tag("div", tag("p", said, class_="sentence"), class_="card verdict")
    word, colon, rest = verdict["sentence"].partition(":")
    marks = {True: ("✓", "holds", "ok"), False: ("✗", "fails", "no"), None: ("–", "not tested", "muted")}
    conditions = [
        tag(
            "li",
            tag("span", f"{sign} ", class_=kind, aria_hidden="true"),
            tag("span", f"{outcome}: ", class_="visually-hidden"),
            condition["clause"],
        )
        for condition in verdict["conditions"]
        for sign, outcome, kind in [marks[condition["passed"]]]
    ]
    return tag(
        "div",
        tag("p", tag("strong", word), colon, rest, class_="sentence"),
        tag("p", "Of the conditions of “supported”:", class_="muted"),
        tag("ul", *conditions, class_="plain-list"),
        tag("p", verdict["limits"], class_="muted small"),
        class_="card verdict",
        data_verdict=verdict["overall"],
    )


def warnings_of(result: Result) -> Markup:
    skipped = at(result.to_json(), "controls_skipped") or {}
    lines = [*result.warnings, *(f"Control {name} was not run: {why}" for name, why in skipped.items())]
    return join(*(tag("p", line, class_="warning") for line in lines))


# ----------------------------------------------------------------------------------------------------------- numbers


def numbers_table(result: Result) -> Markup:
    """Every number with its interval, highest floor, ceiling and p beside it, and the papers' on the same task."""
    content = result.to_json()
    controls = content.get("controls") or {}
    papers = published(result.task.name)
    sources = [s for s in papers if any(number.key in papers[s] for number in NUMBERS)]
    rows: list[Sequence[object]] = []
    for number in present(content):
        control = controls.get(number.control) if number.control else None
        held = bounds(control)
        rows.append(
            [
                number.name,
                shown(at(content, number.key), number.style),
                held.interval or _wilson(result, number),
                held.floor,
                held.ceiling,
                "" if control is None or control["p"] is None else f"{control['p']:.2g}",
                tag("span", beside(content, number.key, p=False) or _gain(controls, number), class_="beside"),
                *(_published(papers[source], number) for source in sources),
            ]
        )
    head: Sequence[object] = [
        "number",
        "value",
        "95 % interval",
        "highest floor",
        "ceiling",
        "p",
        "beside it",
        *sources,
    ]
    numeric = {1, 2, 3, 4, 5, *range(7, len(head))}
    said = "The papers' columns are of other models." if sources else None
    return table(head, rows, numeric=numeric, caption=said, label="The numbers with their controls")


def _published(paper: Mapping[str, float], number: Number) -> str:
    if number.key not in paper:
        return ""
    chance = paper.get("rec2ftp.chance") if number.key == "rec2ftp.value" else None
    return format(paper[number.key], number.style) + ("" if chance is None else f" (chance {chance:.3f})")


def _wilson(result: Result, number: Number) -> str:
    if not number.key.startswith("accuracy."):
        return ""
    return next(
        (f"{s.low:.3f} to {s.high:.3f}" for s in accuracies(result) if number.key.endswith(f".{s.setting}")), ""
    )


def _gain(controls: Mapping[str, Any], number: Number) -> str:
    """How much better than zero-shot, with the interval of the paired difference."""
    control = controls.get(number.key.replace(".", "_")) if number.key.startswith("accuracy.") else None
    if control is None or control["ci"] is None:
        return ""
    return f"over zero-shot {control['value']:+.3f} ({control['ci'][0]:+.3f} to {control['ci'][1]:+.3f})"


def meanings() -> Markup:
    """What each number is, and what 0 and 1 mean."""
    facts = [(tag("dt", number.name), tag("dd", number.meaning)) for number in NUMBERS]
    return tag("details", tag("summary", "What the numbers mean"), tag("dl", *facts, class_="facts"), class_="card")


def floors_table(result: Result) -> Markup | None:
    """Every floor and ceiling of every metric, with what it is and its p."""
    controls = at(result.to_json(), "controls") or {}
    names = {number.control: number.name for number in NUMBERS if number.control}
    rows: list[Sequence[object]] = []
    for metric, control in controls.items():
        if metric not in names:
            continue
        for kind, group in (("floor", "floors"), ("ceiling", "ceilings"), ("beside", "others")):
            for name, value in control[group].items():
                p = control["floors_p"][name] if kind == "floor" else None
                tested = "" if p is None else f"{p:.2g}"
                rows.append([names[metric], kind, name, shown(value, "+.3f"), tested, _told(name)])
    if not rows:
        return None
    head: Sequence[object] = ["number", "bound", "control", "value", "p", "what it is"]
    said = "p: one-sided, that the number does not exceed this floor."
    content = table(head, rows, numeric={3, 4}, caption=said, label="Every floor and ceiling")
    return tag("details", tag("summary", f"Every floor and ceiling ({len(rows)})"), content, class_="card")


def _told(name: str) -> str:
    return ROLES[name].meaning if name in ROLES else _RECORD_FLOORS.get(name, "")


# ------------------------------------------------------------------------------------------------------------ charts


def chart_cards(charts: Sequence[Chart], first: int = 0) -> Markup:
    """A card for every chart; the script draws them from the page's data, in which they are numbered from `first`."""
    return join(
        *(
            tag("div", tag("div", data_chart=first + i), tag("p", chart.said, class_="muted small"), class_="card")
            for i, chart in enumerate(charts)
        )
    )


def no_script() -> Markup:
    return tag("noscript", tag("p", "The charts and the prompts need JavaScript; the tables do not.", class_="warning"))


# ------------------------------------------------------------------------------------------------------- fine-tuning


def tuning_section(result: Result, charts: Markup) -> Markup:
    """How the learning rate and the seed were come by, the loss, and what else the controls found."""
    content = result.to_json()
    selection = content.get("selection") or {}
    tables: list[object] = []
    for name, title, unit in (("lr", "Learning rates tried", "rate"), ("seed", "Seeds tried", "seed")):
        trials: list[dict[str, Any]] = selection.get(name) or []
        if trials:
            chosen = result.ft.lr if name == "lr" else result.provenance.seeds.demos
            rows = [
                [
                    f"{trial['value']:g}",
                    shown(trial["accuracy"]),
                    trial["status"],
                    "chosen" if trial["value"] == chosen else "",
                ]
                for trial in trials
            ]
            said = f"{title}, on {selection['rows']} selection rows that are never reported."
            tables.append(table([unit, "accuracy", "status", "taken"], rows, numeric={1}, caption=said, label=title))
    tables.append(_more(content))
    told = [tag("div", part, class_="card") for part in tables if part is not None]
    return tag("div", charts, *told, class_="cards")


def _more(content: Mapping[str, Any]) -> Markup | None:
    rows: list[Sequence[object]] = []
    if order := content.get("order_sensitivity"):
        said = f"standard deviation over {order['permutations']} orders, {order['queries']} queries"
        rows += [[f"order sensitivity, {name.upper()}", shown(order[name]), said] for name in ("icl", "ft")]
    for name, overlap in (content.get("overlap") or {}).items():
        said = f"overlap cosine {shown(overlap['overlap_cosine'])}"
        rows.append([f"top-10 tokens shared with ICL, {name}", shown(overlap["token_overlap"]), said])
    for name, value in (at(content, "calibrated.accuracy") or {}).items():
        rows.append([f"accuracy, calibrated, {name}", shown(value), "contextual calibration (Zhao et al. 2021)"])
    if not rows:
        return None
    return table(["other numbers", "value", "beside it"], rows, numeric={1}, label="Other numbers")


# -------------------------------------------------------------------------------------------------------- provenance


def _commits(known: Provenance) -> dict[str, object]:
    """The hub's commits behind the model, its code and the task's rows, where they came from the hub."""
    model = {known.model: known.model_commit} if known.model_commit else {}
    found = {**model, **known.code_commits, **known.data_commits}
    said = [join(f"{name} ", tag("code", commit), " ") for name, commit in found.items()]
    return {"hub commits": join(*said)} if said else {}


def provenance_section(result: Result) -> Markup:
    """What made these numbers, and the command that makes them again."""
    known = result.provenance
    run = known.run
    facts: dict[str, object] = {
        "model": known.model,
        **_commits(known),
        "architecture": known.architecture,
        "weights, sha256": tag("code", known.weights_hash),
        "prompts, sha256": tag("code", known.prompts_hash),
        "computed in": f"{known.dtype} on {known.device}, threads: {known.threads}, {known.attention}",
        "versions": ", ".join(f"{name} {version}" for name, version in known.versions.items()),
        "options": ", ".join(f"{name} = {value}" for name, value in known.options.items()) or "all at their defaults",
        "when and where": "unknown" if run is None else f"{run.date}, {run.host}",
        "seconds": ", ".join(f"{name} {seconds:g}" for name, seconds in ({} if run is None else run.seconds).items()),
    }
    listed = tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in facts.items()), class_="facts")
    return join(
        tag("p", "This command repeats the run:"),
        tag("pre", tag("code", command_of(known.options)), tabindex=0),
        listed,
    )
