"""The modifications lab's table, sentences and figure, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dualview.lab.charts import lines
from dualview.lab.harness import LabResult, Table, between, counted, number
from dualview.lab.summaries import mean, range_curve
from dualview.report.charts.spec import Axis, Chart
from dualview.report.figures.curves import Curve
from dualview.report.figures.draw import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "–"
REFERENCE = "softmax/softmax"
SHOWN = (0.7, 1.8)
"""The range of the figure."""
Row = Mapping[str, Any]


def tables(result: LabResult) -> list[Table]:
    """The confirmation of every family's best setting."""
    r, s = result.results, result.settings
    rows: list[list[str]] = []
    families = _families(result)
    for cell in r["cells"]:
        compared = r["compared"][f"{cell['problem']}, {cell['layers']}"]
        by_family = {name.split("/")[0]: _cell(name.split("/")[1], row) for name, row in compared.items()}
        softmax = next((row["reference"] for row in compared.values() if row["reference"] is not None), None)
        start = [cell["problem"], str(cell["layers"]), number(softmax, ".3f", NONE)]
        rows.append([*start, *(by_family[family] for family in families)])
    note = (
        f"{sentence(result)} {_regression_to_the_mean(result)}\n"
        "Each family's best setting, with its difference from softmax attention of the same seed in % of softmax "
        f"attention's mean loss, after {s['steps']} steps (1/L of them with L layers) of {s['batch_size']} problems "
        f"({s['dims']} inputs uniform in ±{s['input_range'] / 2:g}, {s['demos']} demonstrations, {s['heads']} heads). "
        f"Each setting was searched with {s['search_seeds']} seeds; the best was trained again with "
        f"{len(result.seeds)} others and measured on {s['test_tasks']:,} problems. 95 % intervals: Student over "
        "trainings; p of paired t-tests, Holm-corrected over all "
        f"{sum(map(len, r['compared'].values()))}, where a difference survives."
    )
    columns = ["problem", "layers", "softmax loss", *families]
    return [Table("modifications: does the best setting of a family beat softmax attention?", columns, rows, note)]


def _families(result: LabResult) -> list[str]:
    return list(dict.fromkeys(each["family"] for each in result.results["settings"] if each["family"] != "softmax"))


def _cell(setting: str, row: Row) -> str:
    if row["difference"] is None:
        return f"{setting}: diverged"
    ci = None if row["ci"] is None else [100 * end / row["reference"] for end in row["ci"]]
    said = f"{setting}: {100 * row['difference'] / row['reference']:+.1f} ({between(ci, '+.1f', NONE)})"
    return f"{said}, {finding(row)}, p {row['p_holm']:.2g}" if row["survives"] else said


def _regression_to_the_mean(result: LabResult) -> str:
    """How much of what the search promised is left."""
    promised: list[float] = []
    kept: list[float] = []
    for cell, rows in result.results["compared"].items():
        for name, row in rows.items():
            in_search = searched(result, cell, name)
            if in_search is not None and in_search < 0 and row["difference"] is not None:
                promised.append(in_search)
                kept.append(row["difference"] / row["reference"])
    if not promised:
        return "In the search no setting was better than softmax attention."
    return (
        f"In the search {len(promised)} of the chosen settings were better than softmax attention, by "
        f"{-100 * (mean(promised) or 0):.1f} % on average; with fresh seeds these differ from it by "
        f"{100 * (mean(kept) or 0):+.1f} %."
    )


def searched(result: LabResult, cell: str, name: str) -> float | None:
    """The difference in the search, as a share of softmax attention's mean loss."""
    found = result.results["search"][cell]
    own, other = mean(found[name]), mean(found[REFERENCE])
    return None if own is None or other is None or None in found[name] else own / other - 1


def finding(row: Row) -> str:
    """What survives the correction, in a word."""
    if row["difference"] is None:
        return "diverged"
    return ("helps" if row["difference"] < 0 else "hurts") if row["survives"] else "no difference"


def sentence(result: LabResult) -> str:
    """Where each family helps or hurts, in one sentence each."""
    said: list[str] = []
    for family in _families(result):
        found: dict[str, list[str]] = {"helps": [], "hurts": [], "diverged": []}
        for cell in result.results["cells"]:
            rows = result.results["compared"][f"{cell['problem']}, {cell['layers']}"]
            [(name, row)] = [(name, row) for name, row in rows.items() if name.split("/")[0] == family]
            if (what := finding(row)) in found:
                found[what].append(f"{cell['problem']}, {_layers(cell['layers'])} ({name.split('/')[1]})")
        parts = [f"{what} in {'; '.join(where)}" for what, where in found.items() if where]
        total = len(result.results["cells"])
        nothing = f"no difference survives{f' in any of {total} places' if total > 1 else ''}"
        said.append(f"{family.capitalize()}: {'; '.join(parts) or nothing}.")
    return " ".join(said)


def _layers(count: int) -> str:
    return counted(count, "layer")


# ------------------------------------------------------------------------------------------------------------ figure


def figures(result: LabResult) -> dict[str, Figure]:
    """The loss of the search over α, and over β at the largest k, compared with softmax attention's, by depth."""
    r = result.results
    panels: dict[str, Chart] = {}
    for family, symbol in {"regularised": "α", "negative": "β"}.items():
        kinds = [_kind(each["name"]) for each in r["settings"] if each["family"] == family]
        for problem in dict.fromkeys(cell["problem"] for cell in r["cells"]) if kinds else ():
            depths = [cell["layers"] for cell in r["cells"] if cell["problem"] == problem]
            series = {_layers(layers): _curve(result, family, kinds[-1], problem, layers) for layers in depths}
            title = f"{family}{f', {kinds[-1]}' if kinds[-1] else ''}\n{problem}"
            y: Axis = {"label": "loss / softmax's loss", "min": SHOWN[0], "max": SHOWN[1]}
            panels[title] = lines(series, {"label": symbol}, y, {"softmax": 1.0})
    if not panels:
        return {}
    note = (
        f"Search: mean over {result.settings['search_seeds']} seeds, on held-out problems; band: lowest to highest "
        f"seed, each with softmax attention of its own seed. Cut off at {SHOWN[1]:g} times softmax's loss."
    )
    title = "Where do the modifications help or hurt?"
    return {"modifications": draw(list(panels.values()), title, note, (9.6, 3.4), across=list(panels))}


def _kind(name: str) -> str:
    """`k=1` of a negative model's name; nothing of the others'."""
    return name.split(" ")[0] if name.startswith("k=") else ""


def _curve(result: LabResult, family: str, k: str, problem: str, layers: int) -> Curve:
    losses = result.results["search"][f"{problem}, {layers}"]
    found: list[tuple[float, Sequence[float | None]]] = [(0.0, [1.0])]
    for each in result.results["settings"]:
        if each["family"] == family and _kind(each["name"]) == k:
            pairs = zip(losses[f"{family}/{each['name']}"], losses[REFERENCE], strict=True)
            found.append((each["coefficient"], [None if own is None or not ref else own / ref for own, ref in pairs]))
    found.sort(key=lambda pair: pair[0])
    return range_curve([at for at, _ in found], list(zip_longest(*(values for _, values in found))))
