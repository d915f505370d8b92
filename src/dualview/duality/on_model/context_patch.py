"""A context as a patch of a real model's feed-forward weights, block by block (Goldwaser et al. 2026, Alg. 1).

`implicit` has the theorem for one block; here it is applied to any Hugging Face model, discovered by `feed_forward`:

    readers (gate, up, fc1)    ΔW = W (z_C − z) zᵀ/‖z‖²
    carrier                    Δb = δ, or ΔW = δ hᵀ/‖h‖², or Δm = δ/u        δ = (o_C − o)/s

z, h and u are what the *patched* zero-shot pass holds at the query's last token (each block reads the patched state of
the one before), z_C and o_C what the in-context pass holds there; o is the block's output once its readers are patched,
so δ = v_C − v in a sequential block and attn_C − attn in a parallel one. The patched model, asked without the
demonstrations, then gives exactly the logits that the model gives with them.

A patch belongs to one query. `token="last"` applies it at that token alone (the theorem as printed); `token="every"` is
a plain change of weights: every token of the query meets it, the states of all of them change, and the patches are
built from those states, so the equality at the last token is just as exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualview.duality.on_model.block_patches import BlockPatches, Token, fitted, recorded_aims
from dualview.duality.on_model.feed_forward import feed_forwards
from dualview.duality.on_model.single_prompt import forward_row, last_logits
from dualview.duality.theory.linalg import norm
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Patch


def context_patch(
    lm: LanguageModel, context: Sequence[int], query: Sequence[int], bare: Sequence[int] = (), token: Token = "last"
) -> BlockPatches:
    """The patches that make `bare + query` end in the logits of `context + query`.

    context   the tokens before the query (BOS and demonstrations)
    bare      what is left of them without the context (BOS, or nothing)
    """
    if not query:
        raise UserError("A context patch needs a query of at least one token.")
    places = feed_forwards(lm)
    # First the whole in-context pass: each block's patch aims at a state of it.
    aims = recorded_aims(places, [-1], lambda: forward_row(lm, [*context, *query]))
    return fitted(places, aims, [-1], lambda: forward_row(lm, [*bare, *query]), token=token, in_biases=True)


@dataclass(frozen=True)
class PatchReport:
    """How close a patched zero-shot pass is to the in-context pass."""

    error: float
    """Largest difference of the logits at the last token."""
    unpatched: float
    """The same without the patch: what there was to explain."""
    relative: float
    """‖patched − in-context‖ / ‖zero-shot − in-context‖; 0 is equality, 1 what no patch at all leaves."""
    same_token: bool
    """Whether both predict the same next token."""
    gap: float
    """‖zero-shot − in-context‖: what the patched logits are compared with."""


def patch_report(
    lm: LanguageModel,
    context: Sequence[int],
    query: Sequence[int],
    bare: Sequence[int] = (),
    patch: Patch | None = None,
    token: Token = "last",
) -> PatchReport:
    """Ask with the demonstrations, without them, and without them but patched; a patch is built if none is given."""
    applied = context_patch(lm, context, query, bare, token) if patch is None else patch
    aim, plain = last_logits(lm, [*context, *query]), last_logits(lm, [*bare, *query])
    found = last_logits(lm, [*bare, *query], applied)
    gap = norm(plain - aim)
    return PatchReport(
        error=float((found - aim).abs().max()),
        unpatched=float((plain - aim).abs().max()),
        relative=norm(found - aim) / gap if gap else norm(found - aim),
        same_token=bool(found.argmax() == aim.argmax()),
        gap=gap,
    )
