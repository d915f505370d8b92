"""The tables of docs/findings.md: each function makes one of them from the study's results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from aggregate import (
    EMBEDDED,
    RESULTS,
    RULES,
    TASKS,
    Mean,
    at_norm,
    by_task,
    comparison,
    control,
    over,
    over_tasks,
    table,
)
from layout import COMPARISON, SEEDS, against_papers, grid, source

from dualview.lab.frame import LabResult

LABS = Path(__file__).parents[1] / "docs" / "lab"


def run() -> str:
    cells, runs = table("cells"), table("runs")
    kinds = {
        "both rules at their chosen rates, full controls": (cells["controls"] == "full")
        & (cells["lr_asked"] == "auto"),
        "every rate of the grid": (cells["controls"] == "none") & (cells["lr_asked"] != "auto"),
        "the untrained model": cells["weights"] != "trained",
        "1 to 64 demonstrations": (cells["controls"] == "quick") & (cells["weights"] == "trained"),
    }
    rows = [
        [kind, str(len(part)), _tasks(part)] for kind, part in ((kind, cells[which]) for kind, which in kinds.items())
    ]
    versions = runs[["torch", "transformers"]].drop_duplicates().iloc[0]
    queries = cells["n_queries_used"]
    return "\n\n".join(
        [
            grid(["part", "cells", "seeds of each task"], rows),
            f"{len(cells)} cells on the embedded model (weights {cells['weights_hash'].iloc[0][:12]}…), float32, "
            f"{queries.min()} to {queries.max()} queries each, on {_devices(runs)}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}, {runs['date'].min()[:10]} to {runs['date'].max()[:10]}.",
            source("cells.parquet runs.parquet", "dualview sweep studies/…/….yaml --store STORE"),
        ]
    )


def _tasks(cells: pd.DataFrame) -> str:
    """Each task with its number of seeds."""
    counts = cells.groupby("task")["seed"].nunique()
    return ", ".join(f"{task} {counts[task]}" for task in TASKS if task in counts.index)


def _devices(runs: pd.DataFrame) -> str:
    return " and ".join(sorted({"a GPU" if device.startswith("cuda") else "a CPU" for device in runs["device"]}))


def accuracy() -> str:
    cells, other = comparison(), comparison("layer-causal")
    found = {
        "zero-shot": by_task(cells, cells["accuracy_zsl"]),
        "fine-tuned": by_task(cells, cells["accuracy_ft"]),
        "fine-tuned, layer-causal": by_task(other, other["accuracy_ft"]),
        "in-context": by_task(cells, cells["accuracy_icl"]),
    }
    return against_papers("accuracy", found, SEEDS, "cells.parquet")


def rec2ftp() -> str:
    cells = comparison()
    lift = cells["rec2ftp_value"] - cells["rec2ftp_chance"]
    found = {
        "errors that fine-tuning mends": by_task(cells, cells["rec2ftp_n_ft"].astype(float)),
        "Rec2FTP": by_task(cells, cells["rec2ftp_value"]),
        "its chance level": by_task(cells, cells["rec2ftp_chance"]),
        "lift over chance": by_task(cells, lift),
        "in-context in another order (ceiling)": by_task(cells, control(cells, "rec2ftp", "icl_reordered")),
    }
    passed = f"Above chance at p < .01 in {(cells['rec2ftp_p'] < 0.01).sum()} of {len(cells)} cells. "
    return against_papers("rec2ftp", found, passed + SEEDS)


def sim_aou() -> str:
    cells = comparison()
    found = {
        "normalised": by_task(cells, cells["sim_aou_normalised"]),
        "normalised: two independent updates of these sizes": by_task(cells, cells["sim_aou_noise_floor"]),
        "raw": by_task(cells, cells["sim_aou_raw"]),
        "raw: another query's fine-tuning": by_task(cells, control(cells, "sim_aou", "shuffled_query")),
        "raw: demonstrations with random labels": by_task(cells, control(cells, "sim_aou", "icl_random_labels")),
        "raw: fine-tuning on random labels": by_task(cells, control(cells, "sim_aou", "ft_random_labels")),
        "raw: fine-tuning on another task": by_task(cells, control(cells, "sim_aou", "ft_other_task")),
        "raw: fine-tuning with the sign flipped": by_task(cells, control(cells, "sim_aou", "ft_sign_flipped")),
        "raw: another task's demonstrations": by_task(cells, control(cells, "sim_aou", "icl_other_task")),
        "raw: the untrained model": by_task(cells, control(cells, "sim_aou", "untrained")),
        "raw: in-context in another order (ceiling)": by_task(cells, cells["sim_aou_raw_ceiling"]),
    }
    return against_papers("sim_aou", found, SEEDS)


def sim_am() -> str:
    cells = comparison()
    found = {
        "before": by_task(cells, cells["sim_am_before"]),
        "after": by_task(cells, cells["sim_am_after"]),
        "after less before": by_task(cells, cells["sim_am_after"] - cells["sim_am_before"]),
        "of the changes": by_task(cells, cells["sim_am_delta"]),
        "of the changes: demonstrations with random labels": by_task(
            cells, control(cells, "sim_am", "icl_random_labels")
        ),
        "of the changes: fine-tuning on another task": by_task(cells, control(cells, "sim_am", "ft_other_task")),
        "of the changes: the untrained model": by_task(cells, control(cells, "sim_am", "untrained")),
        "of the changes: another order (ceiling)": by_task(cells, cells["sim_am_delta_ceiling"]),
    }
    return against_papers("sim_am", found, SEEDS)


def kendall() -> str:
    cells = comparison()
    found = {
        "as released": by_task(cells, cells["kendall_released_tau_token"]),
        "as released, nothing trained (lr 0)": by_task(cells, cells["kendall_released_lr0_tau_token"]),
        "dual form, values": by_task(cells, cells["kendall_dual_v_tau_token"]),
        "dual form, nothing trained (lr 0)": by_task(cells, cells["kendall_dual_v_lr0_tau_token"]),
        "in-context in another order (ceiling)": by_task(cells, control(cells, "kendall_released", "icl_reordered")),
    }
    return against_papers("kendall", found, SEEDS)


def verdicts() -> str:
    rows = []
    for rule, title in RULES.items():
        cells = comparison(rule)
        counts = cells["verdict"].value_counts()
        learn = (cells["accuracy_icl_gain_ci_low"] > 0) & (cells["accuracy_ft_gain_ci_low"] > 0)
        said = (str(counts.get(each, 0)) for each in ("supported", "indistinguishable", "contradicted"))
        rows.append([title, str(len(cells)), str(int(learn.sum())), *said])
    names = ["cells", "both learn", "supported", "indistinguishable from its controls", "contradicted"]
    shown = grid(["fine-tuning by", *names], rows)
    note = "Both learn: in-context and fine-tuned accuracy each above zero-shot's, by the 95 % interval over queries."
    return f"{shown}\n\n{note}\n\n{source('cells.parquet', COMPARISON)}"


def layers() -> str:
    rows = []
    found = table("layers")
    last = int(found["layer"].max()) + 1
    for start in range(0, last, 5):
        inside = found[found["layer"].between(start, start + 4)]
        row = [f"{start} to {min(start + 4, last - 1)}"]
        for rule in RULES:
            cells = comparison(rule)
            own = inside[inside["key"].isin(cells["key"])]
            for column in ("sim_aou_raw", "sim_am_delta", "update_norm_ft"):
                row.append(over(own.groupby("key")[column].mean()).show())
        own = inside[inside["key"].isin(comparison()["key"])]
        rows.append([*row, *(over(own.groupby("key")[c].mean()).show() for c in ("update_norm_icl", "demo_mass"))])
    names = [f"{what}, {rule}" for rule in ("GD", "LCGD") for what in ("raw SimAOU", "SimAM of changes", "‖Δh‖")]
    shown = grid(["layers", *names, "‖Δh‖ of ICL", "attention on demonstrations"], rows)
    note = "Means over all cells, ± half of the 95 % interval over them. ‖Δh‖ is relative to zero-shot's ‖h‖."
    return f"{shown}\n\n{note}\n\n{source('layers.parquet', COMPARISON)}"


NORMS = (0.5, 0.7, 1.0, 1.5)


def _at_size(norm: float, column: str) -> pd.DataFrame:
    """One column of both rules' curves at one size of update, a row for each cell whose curves both reach it."""
    curves, cells = table("curves").groupby(["key", "rule"]), comparison()
    values = {rule: [at_norm(curves.get_group((key, rule)), norm, column) for key in cells["key"]] for rule in RULES}
    return cells[["task", "seed"]].assign(**values).dropna()


def _closer_at(norm: float) -> Mean:
    """How much closer layer-causal descent is at one size of update."""
    found = _at_size(norm, "sim_aou_raw")
    return over_tasks(found, found["layer-causal"] - found["sgd"])


def matched() -> str:
    rows = []
    for norm in NORMS:
        sim, right = _at_size(norm, "sim_aou_raw"), _at_size(norm, "accuracy")
        values = [over_tasks(sim, sim[rule]).show() for rule in RULES]
        values += [_closer_at(norm).show(), *(over_tasks(right, right[rule]).show() for rule in RULES)]
        rows.append([f"{norm:g}", str(sim["task"].nunique()), str(len(sim)), *values])
    names = ["raw SimAOU, GD", "raw SimAOU, LCGD", "difference", "accuracy, GD", "accuracy, LCGD"]
    shown = grid(["‖Δh‖", "tasks", "cells", *names], rows)
    size = over_tasks(comparison(), comparison()["update_norm_icl"]).show(2)
    note = (
        "Both rules at every rate of the grid, read off at one size of update (interpolated in its logarithm), where "
        "both curves reach it: not the same cells in every row. The first 64 queries of each cell; ± over tasks. The "
        f"size of ICL's own update is {size}."
    )
    return f"{shown}\n\n{note}\n\n{source('curves.parquet cells.parquet', COMPARISON)}"


def layer_causal() -> str:
    found = {}
    for column, title in (("sim_aou_raw", "raw SimAOU"), ("sim_am_delta", "SimAM of the changes")):
        for rule, name in RULES.items():
            cells = comparison(rule)
            found[f"{title}, {name}"] = by_task(cells, cells[column])
    for rule, name in RULES.items():
        cells = comparison(rule)
        found[f"‖Δh‖, {name}"] = by_task(cells, cells["update_norm_ft"])
    return against_papers("layer_causal", found, f"Each rule at its own chosen rate. {SEEDS}", "cells.parquet")


def untrained() -> str:
    cells = comparison()
    shown = {"trained": cells["sim_aou_raw"]}
    shown["embeddings and norms trained"] = control(cells, "sim_aou", "untrained_but_embeddings")
    shown["untrained"] = control(cells, "sim_aou", "untrained")
    means = {f"raw SimAOU, {name}": by_task(cells, values) for name, values in shown.items()}
    means["trained less untrained"] = by_task(cells, shown["trained"] - shown["untrained"])
    return against_papers("untrained", means, SEEDS)


def order() -> str:
    cells, other = comparison(), comparison("layer-causal")
    found = {
        "in-context": by_task(cells, cells["order_sensitivity_icl"]),
        "fine-tuned": by_task(cells, cells["order_sensitivity_ft"]),
        "fine-tuned, layer-causal": by_task(other, other["order_sensitivity_ft"]),
    }
    note = "Standard deviation of the labels' probabilities over five orders of the same demonstrations, 64 queries."
    return against_papers("order", found, f"{note} {SEEDS}", "cells.parquet")


def shots() -> str:
    cells = table("cells")
    cells = cells[(cells["controls"] == "quick") & (cells["weights"] == "trained") & cells["task"].isin(EMBEDDED)]
    rows = []
    for (task, asked), part in cells.groupby(["task", "shots"]):
        columns = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "sim_aou_raw", "sim_aou_raw_floor", "update_norm_icl")
        lift = part["rec2ftp_value"] - part["rec2ftp_chance"]
        rows.append(
            [str(task), str(asked), str(len(part)), *(over(part[c]).show() for c in columns), over(lift).show()]
        )
    names = ["zero-shot", "in-context", "fine-tuned", "raw SimAOU", "its highest floor", "‖Δh‖ of ICL", "Rec2FTP lift"]
    shown = grid(["task", "shots", "seeds", *names], rows)
    return (
        f"{shown}\n\n{SEEDS}\n\n{source('cells.parquet', 'dualview sweep studies/embedded/shots.yaml --store STORE')}"
    )


def momentum() -> str:
    result = LabResult.load(LABS / "language_h200.json")
    told = [s for s in result.results["sentences"] if s.startswith(("momentum", "token shift", "ALiBi"))]
    listed = "\n".join(f"- {sentence}" for sentence in told)
    return f"{listed}\n\n*From [language_h200.json](lab/language_h200.json), made by `{result.provenance['command']}`.*"


def sign() -> str:
    from dualview.lab.sign import tables

    result = LabResult.load(LABS / "sign.json")
    told = tables(result)[0].note.splitlines()[-1]
    return f"{told}\n\n*From [sign.json](lab/sign.json), made by `{result.provenance['command']}`.*"


SMALL = 0.01


def _says(difference: Mean, more: str, less: str, same: str = "no difference") -> str:
    """What the interval of a difference allows to say; `same` if it lies within ± SMALL."""
    if difference.half is not None and abs(difference.value) + difference.half < SMALL:
        return same
    return more if difference.above_zero else less if difference.below_zero else "cannot be told here"


def claims() -> str:
    cells, other = comparison(), comparison("layer-causal")
    raw = cells["sim_aou_raw"]
    lift = over_tasks(cells, cells["rec2ftp_value"] - cells["rec2ftp_chance"])
    query = over_tasks(cells, raw - control(cells, "sim_aou", "shuffled_query"))
    labels = over_tasks(cells, raw - control(cells, "sim_aou", "icl_random_labels"))
    change = over_tasks(cells, cells["sim_am_after"] - cells["sim_am_before"])
    rank = over_tasks(cells, cells["kendall_released_tau_token"] - cells["kendall_released_lr0_tau_token"])
    both = other.merge(cells, on=["task", "seed"], suffixes=("_lc", "_gd"))
    chosen = over_tasks(both, both["sim_aou_raw_lc"] - both["sim_aou_raw_gd"])
    equal = _closer_at(1.0)
    drawn = over_tasks(cells, raw - control(cells, "sim_aou", "untrained"))
    order = over_tasks(cells, cells["order_sensitivity_icl"] - cells["order_sensitivity_ft"])
    floors = table("controls").query("metric == 'sim_aou' and kind == 'floor' and name != 'zsl_shifted'")
    every = int((cells["key"].map(floors.groupby("key")["p"].max()) < 0.01).sum())
    chance, n = int((cells["rec2ftp_p"] < 0.01).sum()), len(cells)
    rows = [
        [
            "ICL gets right what FT puts right (Dai et al., Rec2FTP)",
            _says(lift, "above chance on average", "below chance"),
            f"lift over chance {lift.show()}; p < .01 in {chance} of {n} cells",
        ],
        [
            "their updates of attention's output are alike (Dai et al., SimAOU)",
            _says(query, "more than those of another query", "less than those of another query"),
            f"raw, less another query's {query.show()}",
        ],
        [
            "… because the same task is learnt",
            _says(labels, "less alike with random labels", "more alike so", same="no: as alike with random labels"),
            f"raw, less demonstrations with random labels {labels.show()}; above every floor at p < .01 in {every} of "
            f"{n} cells",
        ],
        [
            "FT brings attention closer to ICL's (Dai et al., SimAM)",
            _says(change, "yes", "the contrary"),
            f"after less before {change.show()}",
        ],
        [
            "FT attends to the training tokens as ICL does (Dai et al., Kendall)",
            _says(rank, "more than the untouched model", "less than the untouched model"),
            f"as released, less the same at learning rate 0: {rank.show()}",
        ],
        [
            "layer-causal descent is closer (Deutch et al.)",
            f"{_says(chosen, 'yes', 'no')} at chosen rates; {_says(equal, 'yes', 'no')} at equal size",
            f"raw SimAOU, layer-causal less plain: {chosen.show()} at chosen rates, {equal.show()} at ‖Δh‖ = 1",
        ],
        [
            "untrained models score as high (Deutch et al.)",
            _says(drawn, "no", "no lower: rather higher"),
            f"raw SimAOU, trained less untrained {drawn.show()}",
        ],
        [
            "ICL depends more on the demonstrations' order than FT (Shen et al.)",
            _says(order, "yes, at these step sizes", "no"),
            f"standard deviation over orders, ICL less FT {order.show()}",
        ],
    ]
    note = (
        "Means over tasks of means over seeds, ± half of the 95 % interval over tasks. Where that interval holds 0 "
        f"nothing can be told; where it lies within ±{SMALL:g}, there is no difference to speak of."
    )
    shown = grid(["claim", "here", "numbers"], rows)
    return f"{shown}\n\n{note}\n\n{source('cells.parquet controls.parquet curves.parquet', COMPARISON)}"


CHECKED = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp_value", "sim_aou_raw", "sim_aou_normalised")
CHECKED += ("sim_am_before", "sim_am_after", "sim_am_delta", "kendall_value", "update_norm_icl", "update_norm_ft")


def check() -> str:
    """The same cells on a CPU and on a GPU: each number's largest difference."""
    both = cpu_and_gpu()
    rows = [
        [name, str(len(both)), f"{(both[f'{name}_cpu'] - both[f'{name}_gpu']).abs().max():.1e}"] for name in CHECKED
    ]
    same = int((both["lr_cpu"] == both["lr_gpu"]).sum())
    told = f"{same} of {len(both)} cells chose the same rate on both ({', '.join(sorted(both['task']))}, seed 1)."
    command = source("check.parquet cells.parquet", "dualview sweep studies/six/check.yaml --store STORE")
    return f"{grid(['number', 'cells', 'largest difference'], rows)}\n\n{told}\n\n{command}"


def cpu_and_gpu() -> pd.DataFrame:
    here = pd.read_parquet(RESULTS / "check.parquet").astype({"seed": int})
    on = ["task", "seed", "ft_rule"]
    return here.merge(comparison(), on=on, suffixes=("_cpu", "_gpu"))


SHOWN = {
    "zsl": "zero-shot",
    "task_vector": "task vector",
    "ft": "fine-tuned",
    "patch": "compiled patch",
    "icl": "prompt",
}


def patch() -> str:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((RESULTS / "patches").glob("*.json"))]
    rows = []
    for task in dict.fromkeys(each["task"]["name"] for each in found):
        own = [each["settings"] for each in found if each["task"]["name"] == task]
        for name, title in SHOWN.items():
            values = [
                over([each[name][what] for each in own]).show() for what in ("accuracy", "agreement", "divergence")
            ]
            rows.append([task, title, str(len(own)), *values])
    shown = grid(["task", "", "seeds", "accuracy", "answers as the prompt", "KL from the prompt"], rows)
    note = (
        f"{found[0]['task']['shots']} demonstrations, {found[0]['n_queries']} queries that neither the patch nor its "
        f"ridge has seen. {SEEDS}"
    )
    command = "dualview compile --task TASK --seed SEED --out patch.safetensors --json TASK-SEED.json"
    return f"{shown}\n\n{note}\n\n*From `studies/results/patches/`, made by `{command}`.*"


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        *(run, claims, verdicts, accuracy, rec2ftp, sim_aou, sim_am, kendall, layers, layer_causal, matched),
        *(untrained, order, shots, patch, momentum, sign, check),
    )
}
