"""What is learnt from the labels: the change that flipping every demonstration's label makes, ICL's against FT's.

    label contrast = cos(h_icl − h_icl[flipped], h_ft − h_ft[flipped]),   per query and layer

*Flipped* labels are the true ones permuted so that no demonstration keeps its own. Texts, template and label words
stay, so whatever the demonstrations teach apart from their labels (format, topic, word frequencies) cancels in both
differences. An ordinary similarity hardly sees labels: under an all-token loss they are a few per cent of it.

Much of what flipping changes is the same for every query: label words near the end of the prompt are other words. Which
ones depends on the order of the demonstrations, and in most layers it is all there is. `specific_contrast` is what is
left: beyond the mean over queries, with layers weighing as much as flipping changes them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from dualview.metrics.arrays import to_numpy
from dualview.metrics.cosine import (
    UNDEFINED_BELOW,
    cosine,
    defined_mean,
    dot,
    each_layer,
    layer_of,
    norm,
    outputs_of,
    place_of,
    ratio,
    root,
)

FLIPPED = {"icl": "icl_flipped_labels", "ft": "ft_flipped_labels"}
"""The settings with flipped labels, by the setting whose labels they flip."""


def label_contrast(
    zsl: Float[np.ndarray, "query layer d_model"],
    icl: Float[np.ndarray, "query layer d_model"],
    icl_flipped: Float[np.ndarray, "query layer d_model"],
    ft: Float[np.ndarray, "query layer d_model"],
    ft_flipped: Float[np.ndarray, "query layer d_model"],
) -> Float[np.ndarray, "query layer"]:
    """cos(h_icl − h_icl[flipped], h_ft − h_ft[flipped]); NaN where either difference is rounding against h_zsl.

    1: labels teach both the same; 0: unrelated; −1: the opposite.
    """

    def of_layer(layer: int) -> np.ndarray:
        z, a, b, c, d = (layer_of(side, layer) for side in (zsl, icl, icl_flipped, ft, ft_flipped))
        return cosine(a - b, c - d, norm(z))[:, 0]

    return np.stack(each_layer(of_layer, zsl.shape[1]), axis=1)


def specific_contrast(
    zsl: Float[np.ndarray, "query layer d_model"],
    icl: Float[np.ndarray, "query layer d_model"],
    icl_flipped: Float[np.ndarray, "query layer d_model"],
    ft: Float[np.ndarray, "query layer d_model"],
    ft_flipped: Float[np.ndarray, "query layer d_model"],
) -> Float[np.ndarray, " query"]:
    """The label contrast of each query beyond the mean over queries, over all layers together:

        c_s = (h_s − h_s[flipped]) / size of h_zsl in the layer,   x_s = c_s − mean over queries
        Σ_layers x_icl·x_ft / √(Σ_layers ‖x_icl‖² Σ_layers ‖x_ft‖²)

    1: labels teach both the same about each query; 0: unrelated, or nothing but what all queries share. NaN where the
    differences are rounding.
    """
    stacks = (zsl, icl, icl_flipped, ft, ft_flipped)
    at = place_of(*stacks)

    def of_layer(layer: int) -> np.ndarray:
        z, a, b, c, d = (outputs_of(side, layer, at) for side in stacks)
        with np.errstate(invalid="ignore", over="ignore"):  # a diverged fine-tuning leaves infinities: they become NaN
            # One size a layer: divided by each query's own, what all queries share would differ from query to query.
            size = root(defined_mean(dot(z, z), axis=0))
            sides = [ratio(side, size) for side in (a - b, c - d)]
            x, y = (side - defined_mean(side, axis=0) for side in sides)
            # What is undefined adds nothing, and a query without anything has no length.
            return np.nan_to_num(np.stack([to_numpy(each) for each in (dot(x, y), dot(x, x), dot(y, y))]))

    layers = zsl.shape[1]
    both, *own = np.sum(each_layer(of_layer, layers, at), axis=0)
    lengths = [np.where(root(side / layers) >= UNDEFINED_BELOW, root(side), np.nan) for side in own]
    return ratio(both, lengths[0] * lengths[1])
