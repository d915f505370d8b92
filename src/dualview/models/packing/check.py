"""Checks whether packed queries give a model's own answers, up to its own rounding.

Two short queries are run packed, several times over, behind a shared prefix and as whole prompts. The two ways add the
same numbers in another order, so they differ by rounding, and how far rounding moves the result is a property of the
model: 1e-6 in log-probability for one, 1e-3 for another with the same dtype. It is therefore measured. In some rows of
the same pass, the output of every module that has weights is moved at random by about one rounding, and what that does
to the log-probabilities is the yardstick. Measured on random models of 28 architectures with small and large weights,
packing moves them at most 5 times as far; mixing tokens by other means than attention, thousands of times as far.

In half precision small effects drown in rounding, so a model in half precision is judged computing in float32: each
module's weights are widened while it runs, one module at a time. No copy of the model is made.
"""

# Weights are swapped for one call of a module, which torch offers no public way to do without touching them.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualview.anatomy.dispatch import AttentionCall, Unsupported, run_forward
from dualview.anatomy.hooks import hooked
from dualview.io.errors import UserError, first_line
from dualview.models.language_model import LanguageModel
from dualview.models.packing.rows import grow, pack
from dualview.models.prefix import Causal, Prefix
from dualview.models.probe import Packed, Whole
from dualview.tasks.prompts import Query

CHECK_VERSION = 2
"""Raise it when the check can give another outcome for the same model: cached outcomes are then ignored."""
HALF = (torch.bfloat16, torch.float16)
ALLOWED = 16.0
"""How many times the measured rounding packed and whole prompts may differ by."""
_PREFIX, _QUERY = 5, 8  # tokens; few, so that a trial is cheap and fits the shortest context
_REPEATED = 4  # as often the queries are in the packed row: some models begin to differ only further into a row
_TOKENS = _PREFIX + _QUERY + (_QUERY + 1) + 2
_TEXT = (
    "The film opens slowly, but its second half is a delight: sharp dialogue, two fine actors and a last scene that "
    "nobody in the audience saw coming."
)
CANNOT_RUN = (Unsupported, RuntimeError, ValueError, TypeError, IndexError)
"""What architectures raise that do not support the pass."""


@dataclass(frozen=True)
class Gap:
    """How far two ways to compute the same thing differ, in log-probability, and how far rounding alone could."""

    found: float
    rounding: float

    @property
    def is_rounding(self) -> bool:
        return self.found <= ALLOWED * self.rounding  # false where either is not a number


@dataclass(frozen=True)
class Tokens:
    """A prefix, a query with two candidate tokens, and a query that is one token longer: all prompts are as long."""

    prefix: tuple[int, ...]
    first: tuple[int, ...]
    candidates: tuple[int, int]
    second: tuple[int, ...]

    @classmethod
    def of(cls, ids: list[int]) -> Tokens:
        one, two = _PREFIX, _PREFIX + _QUERY
        three = two + _QUERY + 1
        return cls(tuple(ids[:one]), tuple(ids[one:two]), (ids[three], ids[three + 1]), tuple(ids[two:three]))

    @cached_property
    def prompts(self) -> list[list[int]]:
        start = [*self.prefix, *self.first]
        return [*([*start, candidate] for candidate in self.candidates), [*self.prefix, *self.second]]

    @cached_property
    def queries(self) -> list[Query]:
        one, two = self.candidates
        return [Query(self.first, ((one, two), (two, one)), 0), Query(self.second, ((one,),), 0)]


def trial_tokens(lm: LanguageModel) -> Tokens:
    """Real text, after the BOS token if there is one; random ordinary tokens where there is not enough text."""
    found: list[int] = []
    special: set[int] = set()
    if lm.tokenizer is not None:
        bos = lm.tokenizer.bos_token_id
        found = [] if bos is None else [int(bos)]
        found += [int(t) for t in lm.tokenizer(_TEXT, add_special_tokens=False)["input_ids"]]
        special = {int(t) for t in lm.tokenizer.all_special_ids}
    if len(found) < _TOKENS or len(set(found)) < _TOKENS // 2 or max(found) >= lm.vocab:
        ordinary = torch.tensor([t for t in range(lm.vocab) if t not in special] or range(lm.vocab))
        drawn = torch.randint(len(ordinary), (_TOKENS,), generator=torch.Generator().manual_seed(0))
        found = ordinary[drawn].tolist()
    tokens = Tokens.of(found[:_TOKENS])
    if len(set(tokens.candidates)) == 1:  # a change of the last token must be a change
        one = tokens.candidates[0]
        tokens = Tokens(tokens.prefix, tokens.first, (one, (one + 1) % lm.vocab), tokens.second)
    return tokens


@dataclass(frozen=True)
class WholePrompts:
    """The model's own answers to the prompts, and how far one unit of rounding per module moves them."""

    expected: Float[Tensor, "read vocab"]
    """Log-probabilities after the first query, after each of its candidates, and after the second query."""
    rounding: float
    later_token: Gap
    """Of the same token's log-probabilities, with another token after it."""


def run_whole(lm: LanguageModel, tokens: Tokens) -> WholePrompts:
    """All prompts in one batch, and two of them a second time with every module's output rounded once more."""
    # The two noisy copies are in the same batch as their originals, so the batch's own effect on rounding cancels.
    ids = torch.tensor([*tokens.prompts, tokens.prompts[0], tokens.prompts[2]], device=lm.device)
    rows, length = ids.shape
    at = torch.arange(length, device=lm.device)
    with torch.no_grad(), _rounded_once_more(lm.model, rows, len(tokens.prompts), length, _unit(lm)):
        logits = run_forward(
            lm.model, Whole(at, range(length), 0, None), ids, at[None].expand(rows, -1), at[-2:], native=True
        )
    found = _log_probs(logits)
    rounding = _apart(found[[0, 2]].flatten(0, 1), found[3:].flatten(0, 1))
    # In the order in which the packed row reads them.
    expected = torch.stack([found[0, 0], found[0, 1], found[1, 1], found[2, 1]])
    return WholePrompts(expected, rounding, Gap(_apart(found[0, :1], found[1, :1]), rounding))


def packed_against_whole(lm: LanguageModel, tokens: Tokens, whole: WholePrompts) -> Gap:
    """The packed queries behind their shared prefix, against the whole prompts."""
    prefix, guessed = _run_prefix(lm, tokens.prefix)
    with ExitStack() as stack:
        if guessed:
            # Only the configuration states the window: a short one shows whether the model has it.
            stack.enter_context(_window_of(lm, 4))
            whole = run_whole(lm, tokens)
            prefix, _ = _run_prefix(lm, tokens.prefix)
        queries = tokens.queries * _REPEATED
        row = pack([grow(query) for query in queries], range(len(queries))).to(lm.device)
        strategy = Packed(row, prefix)
        with torch.no_grad():
            logits = run_forward(lm.model, strategy, row.ids[None], strategy.positions[None], row.read)
    return Gap(_apart(_log_probs(logits[0]), whole.expected.repeat(_REPEATED, 1)), whole.rounding)


def _run_prefix(lm: LanguageModel, ids: tuple[int, ...]) -> tuple[Prefix, bool]:
    """The prefix's keys and values, and whether any layer's window was guessed."""
    at = torch.arange(len(ids), device=lm.device)
    looking = _Looking(at, keep=True)
    with torch.no_grad():
        run_forward(lm.model, looking, torch.tensor([ids], device=lm.device), at[None], at[-1:])
    return Prefix(len(ids), tuple(looking.keys), tuple(looking.values), 1), looking.guessed


class _Looking(Causal):
    """Sees whether any layer's window was guessed."""

    guessed = False

    def attend(self, layer: int, call: AttentionCall) -> Float[Tensor, "batch query head d_value"]:
        self.guessed = self.guessed or call.guessed
        return super().attend(layer, call)


@contextmanager
def _window_of(lm: LanguageModel, width: int) -> Generator[None]:
    config: Any = lm.model.config.get_text_config()
    window, config.sliding_window = config.sliding_window, width
    try:
        yield
    finally:
        config.sliding_window = window


def _unit(lm: LanguageModel) -> float:
    """How far the output of one module is off by rounding, as a share of its size.

    In half precision sums are kept in float32 and rounded once: the standard deviation of a rounding to nearest. In
    float32 the sums themselves round at every step; and models in float64 take some steps in float32.
    """
    if lm.dtype in HALF and not getattr(lm.model, _WIDENED, False):
        return torch.finfo(lm.dtype).eps / 12**0.5
    return torch.finfo(torch.float32).eps


def _log_probs(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    return torch.log_softmax(logits.double() if logits.device.type != "mps" else logits.float(), -1)


def _apart(one: Float[Tensor, "read vocab"], two: Float[Tensor, "read vocab"]) -> float:
    """The root mean square over the vocabulary, at the place where it is largest."""
    # A token that both ways rule out altogether agrees; −∞ − (−∞) would be NaN.
    gap = torch.where(torch.isneginf(one) & torch.isneginf(two), 0.0, one - two)
    return float(gap.square().mean(-1).sqrt().max())


@contextmanager
def _rounded_once_more(model: nn.Module, rows: int, first: int, length: int, unit: float) -> Generator[None]:
    """Move the outputs of all modules with weights by `unit` of their size, in the batch's rows from `first` on.

    The size is that of the whole vector: a sum of many terms is off by a share of the terms, not of their sum.
    """
    draws: dict[torch.device, torch.Generator] = {}

    def move(_module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if output.shape[0] not in (rows, rows * length):  # some modules see all rows as one
            return None
        start = output.shape[0] // rows * first
        later = output[start:]
        if output.device not in draws:
            draws[output.device] = torch.Generator(output.device).manual_seed(0)
        noise = torch.empty_like(later, dtype=torch.float32).uniform_(-1.0, 1.0, generator=draws[output.device])
        size = later.float().square().mean(-1, keepdim=True).sqrt()
        moved = later + (noise * size * (unit * 3**0.5)).to(later.dtype)  # by a standard deviation of `unit`
        return torch.cat([output[:start], moved])

    # Modules without children: moving a block's output as well would count its rounding twice.
    owners = [m for m in model.modules() if m._parameters and not any(True for _ in m.children())]
    with hooked(module.register_forward_hook(move) for module in owners):
        yield


_WIDENED = "_dualview_widened"


@contextmanager
def in_single_precision(model: nn.Module) -> Generator[None]:
    """Compute in float32 with the model's own half-precision weights, each module's widened only while it runs."""
    kept: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        if module in kept:  # it calls itself
            return
        kept[module] = (dict(module._parameters), dict(module._buffers))
        # In place of the tensors, not in them: the half-precision weights are not touched and nothing has to be rounded
        # back.
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.dtype in HALF:
                    wide = tensor.detach().float()
                    held[name] = nn.Parameter(wide, requires_grad=False) if held is module._parameters else wide  # pyright: ignore[reportArgumentType]

    def narrow(module: nn.Module, _inputs: Any, _output: Any) -> None:
        if module in kept:
            parameters, buffers = kept.pop(module)
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    owners = [m for m in model.modules() if m._parameters or m._buffers]
    hooks = [module.register_forward_pre_hook(widen) for module in owners]
    hooks += [module.register_forward_hook(narrow, always_call=True) for module in owners]
    setattr(model, _WIDENED, True)
    try:
        with hooked(hooks):
            yield
    finally:
        delattr(model, _WIDENED)
        for module in list(kept):
            narrow(module, None, None)


def _must_be_causal(lm: LanguageModel, whole: WholePrompts) -> None:
    """An encoder loaded as a language model reads what comes later: changing the last token shows it."""
    if whole.later_token.found > ALLOWED * whole.later_token.rounding:
        raise UserError(f"{lm.name} is not a causal language model: what it predicts depends on later tokens.")


def slow_because(lm: LanguageModel) -> str | None:
    """Why packed prompts are not the same as whole ones for this model, or None where rounding is all that differs.

    In half precision the same question is asked in float32 first, where a small difference shows. An architecture
    that cannot be run so (its code insists on one dtype) is judged by half precision alone, and by its modules.
    """
    tokens = trial_tokens(lm)
    if lm.dtype in HALF:
        try:
            with in_single_precision(lm.model):
                found = _judge(lm, tokens)
        except CANNOT_RUN:
            found = None
        # None here is also "no difference found", which half precision must still confirm.
        if found is not None:
            return found
    return _judge(lm, tokens)


def _judge(lm: LanguageModel, tokens: Tokens) -> str | None:
    whole = run_whole(lm, tokens)
    _must_be_causal(lm, whole)
    # Before the trial: a convolution over tokens may stay within rounding on so few of them.
    mixing = _mixes_tokens(lm)
    if mixing is not None:
        return mixing
    if not lm.shares_prefix(len(tokens.prefix), len(tokens.second) + 1):  # a variant, or positions scaled by length
        return None
    try:
        gap = packed_against_whole(lm, tokens, whole)
    except CANNOT_RUN as error:
        return f"its attention cannot be packed ({first_line(error)})"
    if gap.is_rounding:
        return None
    return (
        f"packed and whole prompts differ by {gap.found:.2g} in log-probability, "
        f"where rounding explains {gap.rounding:.2g}"
    )


def _mixes_tokens(lm: LanguageModel) -> str | None:
    """What the modules of a block reveal without running it."""
    attentive = {layer.module for layer in lm.anatomy.layers}
    for block in lm.anatomy.blocks:
        inside = list(block.modules())
        if not attentive.intersection(inside) or any(isinstance(module, nn.Conv1d) for module in inside):
            return f"{type(block).__name__} mixes tokens by other means than attention"
        if any("Indexer" in type(module).__name__ for module in inside):
            return f"{type(block).__name__} chooses the tokens it attends to"
        # Llama 4 scales queries from the 8,192nd token of a row on, whatever their positions: a trial is too short.
        if any(getattr(module, "attn_temperature_tuning", False) for module in inside):
            return f"{type(block).__name__} scales attention by the place in the row"
    return None
