"""Metrics as pure functions of arrays: no model, no torch unless records are measured on a device, float64 throughout.

`dualview.metrics(records)` recomputes every number of a run. Each metric is also a function here, of the arrays of
`Records`: NaN marks an undefined value, and means leave it out.

    accuracy(log_probs, gold)                          log_probs[query, candidate]
    rec2ftp(gold, zsl, icl, ft)                        log_probs of each setting
    agreement(gold, zsl, icl, ft)                      log_probs of each setting
    sim_aou(zsl, icl, ft), sim_aou_normalised          h[query, layer, d_model]
    label_contrast(zsl, icl, icl_flipped, ft, …)       h[query, layer, d_model]
    relative_update_norm(zsl, setting), noise_floor    h[query, layer, d_model]
    sim_am(zsl, icl, ft, columns)                      m[query, layer, head, key]
    kendall(x, y), top_k_recall(x, y, k)               scores[query, layer, item]
    token_overlap(a, b), overlap_cosine(a, b)          the `top_k` of distributions[query, vocab]
    order_sensitivity(log_probs)                       log_probs[permutation, query, candidate]

`agreement`, `label_contrast`, `sim_aou`, `sim_am` and `kendall` are also the names of the modules that define them: as
attributes of this package they are the functions; `from dualview.metrics.kendall import …` reads the module.
"""

from dualview.io.callable_package import make_callable
from dualview.metrics.agreement import agreement
from dualview.metrics.kendall import kendall, top_k_recall
from dualview.metrics.label_contrast import label_contrast
from dualview.metrics.overlap import overlap_cosine, token_overlap, top_k
from dualview.metrics.predictions import accuracy, order_sensitivity, rec2ftp
from dualview.metrics.sim_am import sim_am
from dualview.metrics.sim_aou import noise_floor, relative_update_norm, sim_aou, sim_aou_normalised
from dualview.metrics.summary import Layered, Metrics, compute_metrics

__all__ = [
    "Layered",
    "Metrics",
    "accuracy",
    "agreement",
    "compute_metrics",
    "kendall",
    "label_contrast",
    "noise_floor",
    "order_sensitivity",
    "overlap_cosine",
    "rec2ftp",
    "relative_update_norm",
    "sim_am",
    "sim_aou",
    "sim_aou_normalised",
    "token_overlap",
    "top_k",
    "top_k_recall",
]

make_callable(__name__, f"{__name__}.recompute.recompute")
