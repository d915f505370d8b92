"""The tables that have the papers' numbers next to the study's."""

from __future__ import annotations

from aggregate import RULES, both_learn, by_task, comparison, control, one_answer, over_tasks, passing, redrawn
from layout import COMPARISON, OVER_TASKS, SEEDS, UNTRAINED, against_papers, grid, source

from dualview.options import GRID


def accuracy() -> str:
    cells, other = comparison(), comparison("layer-causal")
    found = {
        "zero-shot": by_task(cells, cells["accuracy_zsl"]),
        "fine-tuned": by_task(cells, cells["accuracy_ft"]),
        "fine-tuned, layer-causal": by_task(other, other["accuracy_ft"]),
        "in-context": by_task(cells, cells["accuracy_icl"]),
        "fine-tuned less zero-shot": by_task(cells, cells["accuracy_ft_gain"]),
        "layer-causal less zero-shot": by_task(other, other["accuracy_ft_gain"]),
        "in-context less zero-shot": by_task(cells, cells["accuracy_icl_gain"]),
    }
    gains = {"in-context": (cells, "icl"), "fine-tuned": (cells, "ft"), "layer-causal": (other, "ft")}
    ranks = "; ".join(
        f"{title} {(part[f'{gain}_low'] > 0).sum()} and {(part[f'{gain}_high'] < 0).sum()}"
        for title, (part, of) in gains.items()
        for gain in [f"accuracy_{of}_gain_ci"]
    )
    lowest = [(part["lr"] == min(GRID)).sum() for part in (cells, other)]
    note = (
        f"Cells above and below zero-shot by the 95 % interval over queries, of {len(cells)}: {ranks}. The chosen rate "
        f"is the grid's lowest in {lowest[0]} cells of gradient descent and {lowest[1]} of layer-causal descent."
    )
    return against_papers("accuracy", found, f"{note} {SEEDS}", "cells.parquet")


def rec2ftp() -> str:
    cells = comparison()
    lift = cells["rec2ftp_value"] - cells["rec2ftp_chance"]
    controls = {
        "demonstrations with random labels": "icl_random_labels",
        "fine-tuning on random labels": "ft_random_labels",
        "another task's demonstrations": "icl_other_task",
        "in-context in another order (not a bound)": "icl_reordered",
    }
    found = {
        "Rec2FTP": by_task(cells, cells["rec2ftp_value"]),
        "its chance level": by_task(cells, cells["rec2ftp_chance"]),
        "lift over chance": by_task(cells, lift),
        **{title: by_task(cells, control(cells, "rec2ftp", name)) for title, name in controls.items()},
    }
    passed = cells["rec2ftp_p"] < 0.01
    where = ", ".join(f"{task} {count}" for task, count in passed.groupby(cells["task"]).sum().items() if count)
    mended = ", ".join(f"{task} {mean.show(0)}" for task, mean in by_task(cells, cells["rec2ftp_n_ft"]).items())
    note = (
        f"Above chance at p < .01 in {passed.sum()} of {len(cells)} cells ({where}). Errors that fine-tuning mends: "
        f"{mended}; under 20 in {(cells['rec2ftp_n_ft'] < 20).sum()} cells. {OTHER_TASK} {SEEDS}"
    )
    return against_papers("rec2ftp", found, note)


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
    return against_papers("sim_aou", found, f"{OTHER_TASK} {SEEDS}")


OTHER_TASK = "Another task: source, or product for source itself."
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
    learning, similarities = cells[both_learn(cells)], {"sim_aou": "sim_aou_raw", "sim_am": "sim_am_delta"}
    rows = []
    for name, title in FLOORS.items():
        row = [title]
        for metric, column in similarities.items():
            values = control(cells, metric, name)
            row += [over_tasks(cells, each).show() for each in (values, cells[column] - values)]
            row += [f"{passing(cells, name, metric)} / {passing(learning, name, metric)}"]
        rows.append(row)
    names = [
        f"{title}{what}"
        for title in ("raw SimAOU", "SimAM of the changes")
        for what in (" then", " less that", ", p < .01")
    ]
    shown = grid(["in place of the one or the other", *names], rows)
    own = (over_tasks(cells, cells[column]).show() for column in similarities.values())
    flipped = control(cells, "sim_aou", "ft_sign_flipped")
    rank = flipped.corr(cells["update_norm_ft"], method="spearman")
    note = (
        f"Raw SimAOU itself: {next(own)}; SimAM of the changes: {next(own)}. p < .01: of {len(cells)} cells, / of the "
        f"{len(learning)} where both learn, those in which it is above the floor. Up the gradient raw SimAOU is below "
        f"0 in {(flipped < 0).sum()} cells; its rank correlation with fine-tuning's ‖Δh‖ is {rank:.2f}. {OTHER_TASK} "
        f"{OVER_TASKS}"
    )
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
    return against_papers("sim_am", found, f"{OTHER_TASK} {SEEDS}")


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
    drawn = {"untrained_but_embeddings": "embeddings and norms trained", "untrained": "untrained"}
    for metric, column, title in (
        ("sim_aou", "sim_aou_raw", "raw SimAOU"),
        ("sim_am", "sim_am_delta", "SimAM of the changes"),
    ):
        means[f"{title}, trained"] = by_task(cells, cells[column])
        for control_name, name in drawn.items():
            means[f"{title}, {name}"] = by_task(cells, control(cells, metric, control_name))
        less = cells[column] - control(cells, metric, "untrained")
        means[f"{title}, trained less untrained"] = by_task(cells, less)
    return against_papers("untrained", means, SEEDS)


def redrawn_at_own_rate() -> str:
    settings = {"trained": comparison(), "embeddings and norms trained": redrawn("trained-embeddings")}
    settings["untrained"] = redrawn("untrained")
    columns = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "update_norm_icl", "update_norm_ft", "sim_aou_raw")
    rows = []
    for name, cells in settings.items():
        values = [cells[column] for column in columns]
        values += [control(cells, "sim_aou", "shuffled_query"), cells["sim_am_delta"]]
        lift = cells["rec2ftp_value"] - cells["rec2ftp_chance"]
        shown = [over_tasks(cells, each).show() for each in (*values, lift)]
        shown[-1] += f" ({lift.notna().sum()} cells)"
        constant = [str(one_answer(cells, setting)) for setting in ("icl", "ft")]
        counts = [str((cells["verdict"] == verdict).sum()) for verdict in ("supported", "contradicted")]
        rows.append([name, str(len(cells)), *shown, *constant, *counts])
    names = ["cells", "zero-shot", "in-context", "fine-tuned", "‖Δh‖ of ICL", "‖Δh‖ of FT", "raw SimAOU"]
    names += ["raw SimAOU, another query's", "SimAM of the changes", "Rec2FTP lift"]
    names += ["ICL gives one answer to all", "FT gives one answer to all", "supported", "contradicted"]
    made_by = source("cells.parquet controls.parquet", *UNTRAINED, *COMPARISON)
    return f"{grid(['weights', *names], rows)}\n\n{OVER_TASKS}\n\n{made_by}"


def order() -> str:
    cells, other = comparison(), comparison("layer-causal")
    found = {
        "in-context": by_task(cells, cells["order_sensitivity_icl"]),
        "fine-tuned": by_task(cells, cells["order_sensitivity_ft"]),
        "fine-tuned, layer-causal": by_task(other, other["order_sensitivity_ft"]),
    }
    large = cells[cells["update_norm_ft"] > 0.5]
    both = (large[f"order_sensitivity_{of}"].mean() for of in ("icl", "ft"))
    rank = cells["order_sensitivity_ft"].corr(cells["update_norm_ft"], method="spearman")
    note = (
        "Standard deviation of the labels' probabilities over five orders of the same demonstrations, 64 queries. "
        f"Rank correlation of gradient descent's with its ‖Δh‖ over cells: {rank:.2f}. In the {len(large)} cells where "
        f"that is above 0.5: in-context {next(both):.3f}, fine-tuned {next(both):.3f}."
    )
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
        counted = (str(counts.get(each, 0)) for each in ("supported", "indistinguishable", "contradicted"))
        rows.append([title, str(len(cells)), str(int(both_learn(cells).sum())), *counted])
    names = ["cells", "both learn", "supported", "indistinguishable from its controls", "contradicted"]
    shown = grid(["fine-tuning by", *names], rows)
    note = (
        "Both learn: in-context and fine-tuned accuracy each above zero-shot's, by the 95 % interval over queries (the "
        "verdict asks also that each be above any single answer to all)."
    )
    return f"{shown}\n\n{note}\n\n{source('cells.parquet', *COMPARISON)}"
