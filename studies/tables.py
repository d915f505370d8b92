"""The tables beside the papers'."""

from __future__ import annotations

from aggregate import RULES, by_task, comparison, control, redrawn
from layout import COMPARISON, SEEDS, against_papers, grid, source


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
    for weights, name in drawn.items():
        own = redrawn(weights)
        if len(own):
            means[f"raw SimAOU, {name}, at a rate of its own"] = by_task(own, own["sim_aou_raw"])
            another = by_task(own, control(own, "sim_aou", "shuffled_query"))
            means[f"raw SimAOU, {name}, at a rate of its own: another query's"] = another
            means[f"in-context accuracy, {name}"] = by_task(own, own["accuracy_icl"])
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
        learn = (cells["accuracy_icl_gain_ci_low"] > 0) & (cells["accuracy_ft_gain_ci_low"] > 0)
        said = (str(counts.get(each, 0)) for each in ("supported", "indistinguishable", "contradicted"))
        rows.append([title, str(len(cells)), str(int(learn.sum())), *said])
    names = ["cells", "both learn", "supported", "indistinguishable from its controls", "contradicted"]
    shown = grid(["fine-tuning by", *names], rows)
    note = "Both learn: in-context and fine-tuned accuracy each above zero-shot's, by the 95 % interval over queries."
    return f"{shown}\n\n{note}\n\n{source('cells.parquet', *COMPARISON)}"
