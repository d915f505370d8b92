"""SimAOU: do ICL and FT change the attention output in the same way? With its noise floor and update norms."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from dualview.metrics.arrays import as_type, to_numpy
from dualview.metrics.cosine import each_layer, norm, outputs_of, place_of, ratio, root, similarity_table


def sim_aou(
    zsl: Float[np.ndarray, "query layer d_model"],
    icl: Float[np.ndarray, "query layer d_model"],
    ft: Float[np.ndarray, "query layer d_model"],
) -> Float[np.ndarray, "query layer"]:
    """Raw SimAOU: cos(h_icl − h_zsl, h_ft − h_zsl) (Deutch et al. 2311.07772, section 3).

    1: the same change of the attention output; 0: unrelated changes; NaN: undefined. Caveat: both changes start from
    the same h_zsl, so two settings that merely shrink its heads agree; the `head_span` floor shows by how much.
    """
    return similarity_table("update", zsl, icl, ft)


def sim_aou_normalised(
    zsl: Float[np.ndarray, "query layer d_model"],
    icl: Float[np.ndarray, "query layer d_model"],
    ft: Float[np.ndarray, "query layer d_model"],
) -> Float[np.ndarray, "query layer"]:
    """Normalised SimAOU: the same with each h divided by its norm first (Dai et al. 2212.10559 v3, section 4.3).

    Two independent updates do not give 0 here but `noise_floor`: large updates alone raise it.
    """
    return similarity_table("normalised", zsl, icl, ft)


def relative_update_norm(
    zsl: Float[np.ndarray, "query layer d_model"], setting: Float[np.ndarray, "query layer d_model"]
) -> Float[np.ndarray, "query layer"]:
    """‖h − h_zsl‖ / ‖h_zsl‖: 0, no change; 1, a change as large as the output itself. NaN where h_zsl is 0."""
    at = place_of(zsl, setting)

    def of_layer(layer: int) -> np.ndarray:
        base, other = (outputs_of(side, layer, at) for side in (zsl, setting))
        with np.errstate(invalid="ignore", over="ignore"):
            return to_numpy(ratio(norm(other - base), norm(base)))

    return np.stack(each_layer(of_layer, zsl.shape[1], at), axis=1)


def noise_floor(
    icl_norm: Float[np.ndarray, "*_shape"], ft_norm: Float[np.ndarray, "*_shape"]
) -> Float[np.ndarray, "*_shape"]:
    """What normalised SimAOU gives for two independent random updates: ½·√((1−c₁)(1−c₂)), c = 1/√(1+s²).

    s: the relative update norm of ICL and of FT. Both normalised updates lean back towards −h_zsl by 1 − c, and that
    shared lean is all they have in common. 0 for tiny updates, ½ for huge ones, and .25 at s = √3 (Deutch et al.,
    section 3). Exact when the updates are orthogonal to h_zsl and to each other, as random ones nearly are.

    >>> round(float(noise_floor(np.array(3**0.5), np.array(3**0.5))), 6)
    0.25
    """
    lean = [1 - 1 / root(1 + as_type(s, "float64") ** 2) for s in (icl_norm, ft_norm)]
    return 0.5 * root(lean[0] * lean[1])
