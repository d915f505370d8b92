"""What is learnt from the labels: the change that flipping every demonstration's label makes, ICL's against FT's.

    label contrast = cos(h_icl − h_icl[flipped], h_ft − h_ft[flipped]),   per query and layer

*Flipped* labels are the true ones permuted so that no demonstration keeps its own. Texts, template and label words
stay, so whatever the demonstrations teach apart from their labels (format, topic, word frequencies) cancels in both
differences. An ordinary similarity hardly sees labels: under an all-token loss they are a few per cent of it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from dualview.metrics.cosine import cosine, each_layer, layer_of, norm

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
