"""The trial that decides between packed and whole prompts: rounding passes, large or not; mixing of tokens never."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import zoo
from dualview.anatomy.layers import dissect
from dualview.io.errors import UserError
from dualview.models.language_model import LanguageModel
from dualview.models.loading import adopt
from dualview.models.packing.check import (
    ALLOWED,
    Gap,
    in_single_precision,
    packed_against_whole,
    run_whole,
    trial_tokens,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def untried(model: PreTrainedModel, tokenizer: Any = None) -> LanguageModel:
    return LanguageModel("untried", model, tokenizer, dissect(model))


def loud(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose logits are in the thousands, so that float32 itself resolves them to 1e-4 at best."""
    model = zoo.make(name, dtype=dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1000)  # pyright: ignore
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2-bias", "mixtral", "gpt_neox", "stablelm"])
def test_rounding_passes_even_where_it_is_large(name: str) -> None:
    lm = untried(loud(name))
    tokens = trial_tokens(lm)
    whole = run_whole(lm, tokens)
    gap = packed_against_whole(lm, tokens, whole)
    assert gap.rounding > 4e-4, "twice what a fixed tolerance of 2e-4 would allow for"
    assert gap.is_rounding and adopt(lm.model, None, name).fast


def test_the_gap_is_judged_against_rounding() -> None:
    assert Gap(ALLOWED * 0.9, 1.0).is_rounding and not Gap(ALLOWED * 1.1, 1.0).is_rounding
    assert not Gap(float("nan"), 1.0).is_rounding and not Gap(1.0, float("nan")).is_rounding


def left_neighbour(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))


def mean_so_far(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def row_position(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[None, :, None].expand_as(x)


def first_of_the_row(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


def twenty_before(x: Tensor) -> Tensor:
    """Nothing of a row as short as a trial's whole prompts."""
    return torch.nn.functional.pad(x, (0, 0, 20, 0))[:, : x.shape[1]]


def later_in_the_row(x: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[1], device=x.device) >= 24)[:, None]


MIXERS: tuple[Callable[[Tensor], Tensor], ...] = (
    left_neighbour,
    mean_so_far,
    row_position,
    first_of_the_row,
    twenty_before,
    later_in_the_row,
)


def mixing(model: PreTrainedModel, mixer: Callable[[Tensor], Tensor], strength: float = 1e-3) -> PreTrainedModel:
    """Let one layer's MLP see a trace of what lies elsewhere in the row."""

    def see(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] + strength * mixer(args[0]).to(args[0].dtype), *args[1:])

    model.model.layers[1].mlp.register_forward_pre_hook(see)  # pyright: ignore
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.__name__)
def test_a_trace_of_other_tokens_is_found(mixer: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    found = adopt(mixing(zoo.make("llama", dtype=dtype), mixer), None, "mixing").slow_because
    assert found is not None and "where rounding explains" in found
    assert adopt(zoo.make("llama", dtype=dtype), None, "plain").fast, "and without it the same model is fast"


def test_in_half_precision_alone_the_trace_would_be_lost() -> None:
    """Why such models are judged in float32: their own rounding is larger than what is looked for."""
    lm = untried(mixing(zoo.make("llama", dtype=torch.bfloat16), left_neighbour))
    tokens = trial_tokens(lm)
    assert packed_against_whole(lm, tokens, run_whole(lm, tokens)).is_rounding
    with in_single_precision(lm.model):
        assert not packed_against_whole(lm, tokens, run_whole(lm, tokens)).is_rounding


def leak(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (args[0] + 1e-3 * mean_so_far(args[0]).to(args[0].dtype),)


def whole_row(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand_as(x)


def test_attention_that_leaks_past_its_mask_is_found() -> None:
    """An output projection that adds a thousandth of what all tokens before it in the row hold."""
    for dtype in (torch.float32, torch.bfloat16):
        model = zoo.make("llama", dtype=dtype)
        model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(leak)  # pyright: ignore
        assert adopt(model, None, "leaking").slow_because is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_of_later_tokens_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match="not a causal language model"):
        adopt(mixing(zoo.make("llama", dtype=dtype), whole_row, 0.02), None, "encoder")


def test_single_precision_is_lent() -> None:
    model = zoo.make("llama", dtype=torch.bfloat16)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    ids = torch.arange(5)[None]
    seen: list[torch.dtype] = []
    probe = model.model.layers[0].mlp.down_proj  # pyright: ignore

    def see(_module: Any, _inputs: Any, output: Tensor) -> None:
        seen.append(output.dtype)

    probe.register_forward_hook(see)
    with torch.no_grad(), in_single_precision(model):
        wide = model(ids).logits
        assert all(p.dtype == torch.bfloat16 for p in model.parameters()), "nothing stays widened between modules"
    assert wide.dtype == torch.float32 and seen[-1] == torch.float32
    exact = zoo.make("llama", dtype=torch.bfloat16).double()
    with torch.no_grad():
        torch.testing.assert_close(wide.double(), exact(ids).logits, atol=1e-3, rtol=1e-3)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


def test_single_precision_is_given_back_after_an_error() -> None:
    model = zoo.make("llama", dtype=torch.bfloat16)
    before = dict(model.named_parameters())

    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(fail)  # pyright: ignore
    with pytest.raises(ValueError, match="in the middle"), in_single_precision(model):
        model(torch.arange(5)[None])
    hook.remove()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model(torch.arange(5)[None]).logits.dtype == torch.bfloat16


def test_a_model_that_insists_on_half_precision_is_judged_in_it() -> None:
    model = zoo.make("llama", dtype=torch.bfloat16)

    def insist(_module: Any, args: tuple[Tensor, ...]) -> None:
        if args[0].dtype != torch.bfloat16:
            raise RuntimeError("expected BFloat16")

    model.model.layers[0].mlp.register_forward_pre_hook(insist)  # pyright: ignore
    assert adopt(model, None, "insisting").fast
    assert adopt(mixing(model, left_neighbour, 1.0), None, "mixing").slow_because is not None


def test_the_trial_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    model = zoo.make("gpt2", dtype=torch.bfloat16)
    torch.set_rng_state(before)
    adopt(model, None, "gpt2")
    assert torch.equal(torch.get_rng_state(), before)


class Words:
    """A tokenizer of whole words, and of nothing else."""

    bos_token_id = 1
    all_special_ids = (0, 1, 2)

    def __init__(self, known: int):
        self.known = known

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [3 + i % self.known for i, _ in enumerate(text.split())]}


def test_the_tokens_are_text() -> None:
    lm = SimpleNamespace(vocab=101, tokenizer=Words(90))
    tokens = trial_tokens(lm)  # pyright: ignore
    assert tokens.prefix == (1, 3, 4, 5, 6) and tokens.first == tuple(range(7, 15))
    assert {len(prompt) for prompt in tokens.prompts} == {14} and len(set(tokens.candidates)) == 2


@pytest.mark.parametrize("tokenizer", [None, Words(3), Words(90)], ids=["none", "few words", "ids beyond the model"])
def test_without_enough_text_they_are_ordinary_tokens(tokenizer: Any) -> None:
    lm = SimpleNamespace(vocab=20, tokenizer=tokenizer)
    tokens = trial_tokens(lm)  # pyright: ignore
    used = {*tokens.prefix, *tokens.first, *tokens.second, *tokens.candidates}
    assert max(used) < 20 and len(used) > 5 and len(set(tokens.candidates)) == 2
    assert tokenizer is None or not used & {0, 1, 2}


def test_attention_scaled_by_the_place_in_a_long_row_is_found() -> None:
    """It begins thousands of tokens into a row, so no trial is long enough."""
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
    config = AutoConfig.for_model("llama4_text", **shape, **heads, num_local_experts=4, num_experts_per_tok=1)
    for scaled in (True, False):
        config.attn_temperature_tuning = scaled
        found = adopt(AutoModelForCausalLM.from_config(config), None, "tiny").slow_because
        assert (found is not None and "scales attention by the place in the row" in found) == scaled
