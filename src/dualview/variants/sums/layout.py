"""Which keys each query may read, taken from the mask Hugging Face hands over, as a few index vectors.

Causal, padded, sliding-window, chunked and packed masks all have one form: row t reads the real keys of an interval
[first_t, own_t], own_t being the token itself. Sums over such rows need no query × key matrix.

Positions are counted in real tokens, so that padding changes nothing, wherever it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualview.io.errors import UserError


@dataclass(frozen=True)
class Layout:
    """`batch` is 1 where all sequences have the same layout. Rows that see nothing (left padding) point at key 0."""

    first: Int[Tensor, "batch query"]
    """Index of the first key the row reads."""
    own: Int[Tensor, "batch query"]
    """Index of the row's own key, the last one it reads."""
    real: Bool[Tensor, "batch key"]
    """False for padding, and for keys that no row of this call reads."""
    before: Int[Tensor, "batch key"]
    """How many real keys come before each key."""
    plain: bool
    """There was no mask, hence neither padding nor window: every row reads from key 0 to itself."""

    def rows_of_every_key(self) -> Layout:
        """The layout with one row per key, each reading everything up to itself: valid where no window hides keys."""
        keys = torch.arange(self.real.shape[-1], device=self.real.device).expand_as(self.real)
        return Layout(torch.zeros_like(keys), keys, self.real, self.before, self.plain)

    def earlier(self, rows: slice) -> Bool[Tensor, "batch rows key"]:
        """Which keys come before each of these rows, among those it reads."""
        keys = torch.arange(self.real.shape[-1], device=self.real.device)
        inside = (keys >= self.first[:, rows, None]) & (keys < self.own[:, rows, None])
        return inside & self.real[:, None]

    def distance(self) -> Int[Tensor, "batch query key"]:
        """Real tokens from each key to each row, 0 for the row's own key."""
        return (self.before.gather(1, self.own)[:, :, None] - self.before[:, None]).clamp(min=0)

    def count(self) -> Int[Tensor, "batch query"]:
        """How many keys each row reads (1 for a row that reads none, so that it can divide)."""
        return self.before.gather(1, self.own) - self.before.gather(1, self.first) + 1


# The softmax rounds to 0 from about −100 on, so there the difference does not matter; a sum over the keys that are read
# must know it. Models hide keys with −10⁴ (−9984 in bfloat16), −10⁹, the dtype's minimum or −∞.
_HIDES, _READS = -9000.0, -1000.0


def visible(
    mask: Bool[Tensor, "batch one query key"] | Float[Tensor, "batch one query key"],
) -> Bool[Tensor, "batch one query key"]:
    """The mask as booleans, whether it came as booleans or as numbers to add: −9000 and below hides a key, −1000 and
    above is a bias on a key that is read, and anything between could be either and is refused."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask >= _READS
    if not torch.compiler.is_compiling() and not bool((seen | (mask <= _HIDES)).all()):
        raise UserError(
            "The attention mask holds nan or numbers between -9000 and -1000, which neither clearly hide a key nor "
            "clearly leave it to be read; hide with -inf and keep biases above -1000."
        )
    return seen


def layout_of(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Layout:
    """`read_layout`, but once for all the layers that share a mask: the result stays with the mask tensor.

    On a GPU the check it makes waits for the device, which is better done once per pass than once per layer. Inside
    `torch.compile`, where it would cut the graph, the check is left out.
    """
    if mask is None or torch.compiler.is_compiling():
        return read_layout(mask, queries, keys, device)
    notes: dict[str, tuple[int | None, Layout]] = vars(mask)
    version = None if mask.is_inference() else mask._version
    known = notes.get("dualview_layout")
    if known is None or known[0] != version:
        known = notes["dualview_layout"] = (version, read_layout(mask, queries, keys, device))
    return known[1]


def read_layout(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Layout:
    """The layout behind a mask; no mask means that the queries are the last of the keys and read all up to themselves.

    A mask of another form (a prefix read in both directions, say, or one that hides a token from itself) is refused: a
    running sum over it means nothing.
    """
    at = torch.arange(keys, device=device)[None]
    if mask is None:
        own = at[:, keys - queries :]
        return Layout(torch.zeros_like(own), own, torch.ones_like(at, dtype=torch.bool), at, plain=True)
    seen = visible(mask)
    if seen.shape[1] != 1:
        raise UserError("This attention variant needs one mask for all heads; the model passed a mask per head.")
    seen = seen[:1, 0] if seen.stride(0) == 0 else seen[:, 0]
    marks = seen.to(torch.uint8)
    empty = ~seen.any(-1)
    first = marks.argmax(-1)
    own = (keys - 1 - marks.flip(-1).argmax(-1)).masked_fill(empty, 0)
    real = seen.any(-2)
    band = (at[:, None] >= first[..., None]) & (at[:, None] <= own[..., None]) & real[:, None] & ~empty[..., None]
    if not torch.compiler.is_compiling() and not (torch.equal(band, seen) and _ends_at_itself(own, empty, real)):
        raise UserError(
            "This attention variant works with causal masks (padding, windows, chunks and packed sequences included), "
            "and this mask reads ahead, hides a token from itself or has gaps in some rows only; use plain attention "
            "there."
        )
    return Layout(first, own, real, real.long().cumsum(-1) - real.long(), plain=False)


def _ends_at_itself(
    own: Int[Tensor, "batch query"], empty: Bool[Tensor, "batch query"], real: Bool[Tensor, "batch key"]
) -> bool:
    """Whether the last key that each row reads is the row's own, or lies before it if the row is padding.

    The rows are consecutive keys. Where they start cannot be counted from the end, since a cache of fixed size may end
    in blanks: it is where the row that reads furthest ahead puts it, and all of them must fit in behind.
    """
    queries, keys = own.shape[1], real.shape[1]
    at = torch.arange(queries, device=own.device)
    start = (own - at).masked_fill(empty, 0).amax(-1, keepdim=True).clamp(min=0)
    itself = start + at
    if bool((itself >= keys).any()):
        return False
    is_real = real.gather(1, itself)
    return bool((~is_real | ((own == itself) & ~empty)).all())  # a row that is padding ends earlier, by choice of start
