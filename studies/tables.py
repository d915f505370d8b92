"""The tables beside the papers'."""

from __future__ import annotations

from aggregate import RULES, both_learn, by_task, comparison, control, over_tasks, passing, redrawn
from layout import COMPARISON, OVER_TASKS, SEEDS, UNTRAINED, against_papers, grid, source


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
        "Rec2FTP": by_task(cells, cells["rec2ftp_value"]),
        "its chance level": by_task(cells, cells["rec2ftp_chance"]),
        "lift over chance": by_task(cells, lift),
        "in-context in another order (ceiling)": by_task(cells, control(cells, "rec2ftp", "icl_reordered")),
    }
    mended = ", ".join(f"{task} {mean.show(0)}" for task, mean in by_task(cells, cells["rec2ftp_n_ft"]).items())
    passed = f"Above chance at p < .01 in {(cells['rec2ftp_p'] < 0.01).sum()} of {len(cells)} cells. "
    passed += f"Errors that fine-tuning mends: {mended}. "
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


FLOORS = {
    "gaussian": "FT: a random update of the same size",
    "shuffled_query": "FT: its update of another query",
    "mean_direction": "FT: its mean update over queries",
    "zsl_direction": "FT: its part along the zero-shot vector",
    "rotated": "FT: what these two explain, the rest turned at random",
    "ft_random_labels": "FT on random labels",
    "ft_other_task": "FT on another task",
    "ft_sign_flipped": "FT up the gradient",
    "icl_random_labels": "ICL with random labels",
    "icl_other_task": "ICL with another task's demonstrations",
    "icl_random_text": "ICL with random text",
    "untrained_but_embeddings": "a model of which only embeddings and norms are trained",
    "untrained": "an untrained model",
}


def floors() -> str:
    cells = comparison()
    learning = cells[both_learn(cells)]
    rows = []
    for name, title in FLOORS.items():
        values = control(cells, "sim_aou", name)
        means = (over_tasks(cells, each).show() for each in (values, cells["sim_aou_raw"] - values))
        counts = (str(passing(part, name)) for part in (cells, learning))
        rows.append([title, *means, *counts])
    passed = [f"at p < .01, of {len(cells)} cells", f"of the {len(learning)} where both learn"]
    shown = grid(["in place of the one or the other", "raw SimAOU then", "raw SimAOU less that", *passed], rows)
    note = f"Raw SimAOU itself: {over_tasks(cells, cells['sim_aou_raw']).show()}. {OVER_TASKS}"
    return f"{shown}\n\n{note}\n\n{source('cells.parquet controls.parquet', *COMPARISON)}"


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


def layer_causal() -> str:
    found = {}
    for column, title in (
        ("sim_aou_normalised", "normalised SimAOU"),
        ("sim_aou_raw", "raw SimAOU"),
        ("sim_am_after", "SimAM after"),
        ("sim_am_delta", "SimAM of the changes"),
    ):
        for rule, name in RULES.items():
            cells = comparison(rule)
            found[f"{title}, {name}"] = by_task(cells, cells[column])
    for rule, name in RULES.items():
        cells = comparison(rule)
        found[f"‖Δh‖, {name}"] = by_task(cells, cells["update_norm_ft"])
    return against_papers("layer_causal", found, f"Each rule at its own chosen rate. {SEEDS}", "cells.parquet")


def untrained() -> str:
    cells, means = comparison(), {}
    drawn = {"trained-embeddings": "embeddings and norms trained", "untrained": "untrained"}
    names = {"trained-embeddings": "untrained_but_embeddings", "untrained": "untrained"}
    for metric, column, title in (
        ("sim_aou", "sim_aou_raw", "raw SimAOU"),
        ("sim_am", "sim_am_delta", "SimAM of the changes"),
    ):
        means[f"{title}, trained"] = by_task(cells, cells[column])
        for weights, name in drawn.items():
            means[f"{title}, {name}"] = by_task(cells, control(cells, metric, names[weights]))
        less = cells[column] - control(cells, metric, "untrained")
        means[f"{title}, trained less untrained"] = by_task(cells, less)
    return against_papers("untrained", means, SEEDS)


def redrawn_at_own_rate() -> str:
    trained = comparison()
    settings = {"trained": trained, "embeddings and norms trained": redrawn("trained-embeddings")}
    settings["untrained"] = redrawn("untrained")
    rows = []
    for name, cells in settings.items():
        columns = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "update_norm_icl", "update_norm_ft", "sim_aou_raw")
        values = [cells[column] for column in columns]
        values += [control(cells, "sim_aou", "shuffled_query"), cells["sim_am_delta"]]
        values.append(cells["rec2ftp_value"] - cells["rec2ftp_chance"])
        counts = (str((cells["verdict"] == said).sum()) for said in ("supported", "contradicted"))
        rows.append([name, str(len(cells)), *(over_tasks(cells, each).show() for each in values), *counts])
    names = ["cells", "zero-shot", "in-context", "fine-tuned", "‖Δh‖ of ICL", "‖Δh‖ of FT", "raw SimAOU"]
    names += ["raw SimAOU, another query's", "SimAM of the changes", "Rec2FTP lift", "supported", "contradicted"]
    made_by = source("cells.parquet controls.parquet", *UNTRAINED, *COMPARISON)
    return f"{grid(['weights', *names], rows)}\n\n{OVER_TASKS}\n\n{made_by}"


def order() -> str:
    cells, other = comparison(), comparison("layer-causal")
    found = {
        "in-context": by_task(cells, cells["order_sensitivity_icl"]),
        "fine-tuned": by_task(cells, cells["order_sensitivity_ft"]),
        "fine-tuned, layer-causal": by_task(other, other["order_sensitivity_ft"]),
    }
    note = "Standard deviation of the labels' probabilities over five orders of the same demonstrations, 64 queries."
    return against_papers("order", found, f"{note} {SEEDS}", "cells.parquet")


def overlap() -> str:
    cells = comparison()
    found = {
        "fine-tuned": by_task(cells, cells["overlap_ft_token_overlap"]),
        "zero-shot": by_task(cells, cells["overlap_zsl_token_overlap"]),
        "in-context in another order (ceiling)": by_task(cells, cells["overlap_icl_reordered_token_overlap"]),
    }
    note = f"How many of the ten likeliest next tokens are also among in-context learning's ten. {SEEDS}"
    return against_papers("overlap", found, note, "cells.parquet")


def verdicts() -> str:
    rows = []
    for rule, title in RULES.items():
        cells = comparison(rule)
        counts = cells["verdict"].value_counts()
        said = (str(counts.get(each, 0)) for each in ("supported", "indistinguishable", "contradicted"))
        rows.append([title, str(len(cells)), str(int(both_learn(cells).sum())), *said])
    names = ["cells", "both learn", "supported", "indistinguishable from its controls", "contradicted"]
    shown = grid(["fine-tuning by", *names], rows)
    note = "Both learn: in-context and fine-tuned accuracy each above zero-shot's, by the 95 % interval over queries."
    return f"{shown}\n\n{note}\n\n{source('cells.parquet', *COMPARISON)}"
