"""Every variant inside Hugging Face models: cached decoding, padding, zero coefficients, in float64."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import transformers as tf

from close import assert_close
from dualview.io.errors import UserError
from dualview.variants import (
    VARIANTS,
    Alibi,
    Augmented,
    Momentum,
    Negative,
    Regularised,
    TokenShift,
    attach,
    demonstrations,
    detach,
    implementation,
    register,
    variant_parameters,
)
from variants.cases import CASES, IDS

REFUSED = ("gemma2", "linear")
MODELS = ["llama", "gpt2", "gpt_neox", "qwen3", "mistral", "gemma2", "gemma3", "olmo3", "llama4"]


def tokens(rows=2, length=13):
    return torch.randint(2, 40, (rows, length), generator=torch.Generator().manual_seed(7))


# Gemma 2 caps its logits, which means nothing without a softmax: that pair is refused (test_attach).
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        pytest.param(k, v, id=f"{k}-{i}")
        for k in MODELS
        for v, i in zip(CASES, IDS, strict=True)
        if (k, v.name) != REFUSED
    ],
)
def test_cached_decoding_is_the_full_pass(kit, kind, variant):
    """In float64 to 1e-11, with left padding, piecewise and token by token, with the model's own kind of cache."""
    model = kit.equipped(kind, variant)
    ids, mask = tokens(), torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=kit.positions(mask), use_cache=False).logits
        steps = kit.decoded(model, ids, mask, None, [5, 8, 9, 10, 11, 12])
    real = mask.bool()
    assert full[real].std() > 0.1
    torch.testing.assert_close(steps[real], full[real], rtol=0, atol=1e-11)


@pytest.mark.parametrize("variant", CASES, ids=IDS)
@pytest.mark.parametrize(
    ("cache", "kind"), [("dynamic", "mistral"), ("static", "llama"), ("static", "mistral"), ("static", "gemma3")]
)
def test_other_caches(kit, variant, cache, kind):
    """A cache that never forgets in a sliding-window model, and ones of fixed size; the latter left-padded."""
    model = kit.equipped(kind, variant)
    ids, mask = tokens(), torch.ones(2, 13, dtype=torch.long)
    if cache == "static":
        mask[0, :2] = 0
    held = tf.DynamicCache() if cache == "dynamic" else tf.StaticCache(config=model.config, max_cache_len=20)
    real = mask.bool()
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=kit.positions(mask), use_cache=False).logits
        for cuts in ([3, 5, 8, 9, 10, 11, 12], [6, 7, 8]):
            held.reset()
            steps = kit.decoded(model, ids, mask, held, cuts)
            torch.testing.assert_close(steps[real], full[real], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
@pytest.mark.parametrize("variant", CASES, ids=IDS)
def test_generate(kit, kind, variant):
    """What `generate` writes from a left-padded batch is what taking the best token of full passes writes."""
    model = kit.equipped(kind, variant)
    prompt, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    prompt[0, :2], mask[0, :2] = 0, 0
    written = model.generate(prompt, attention_mask=mask, max_new_tokens=7, do_sample=False)
    assert written.shape == (2, 13)
    with torch.no_grad():
        for row in range(2):
            ids = prompt[row][mask[row].bool()][None]
            for _ in range(7):
                best = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, best], 1)
            assert written[row, -ids.shape[1] :].tolist() == ids[0].tolist()


def test_gradient_checkpointing_gives_the_same_gradients(kit):
    found = []
    for checkpointing in (False, True):
        model = kit.model("llama")
        attach(model, Momentum(learnable=True, per="head"))
        model.train()
        if checkpointing:
            # The name since transformers 5.23, and the one before.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", CASES, ids=IDS)
def test_padded_batches_are_their_rows(kit, kind, side, variant):
    model = kit.equipped(kind, variant)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    with torch.no_grad():
        both = model(ids, attention_mask=mask, position_ids=kit.positions(mask), use_cache=False).logits
        for row in range(2):
            real = mask[row].bool()
            alone = model(ids[row][real][None], use_cache=False).logits[0]
            torch.testing.assert_close(both[row][real], alone, rtol=0, atol=1e-12)


ZEROS = [
    Momentum(eta=0.0),
    Regularised(alpha=0.0),
    Regularised(alpha=0.0, form="strict"),
    Augmented(c=0.0),
    Negative(beta=0.0, k=3),
    TokenShift(eta=0.0),
]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen3", "mistral", "phi3"])
@pytest.mark.parametrize("variant", ZEROS, ids=[f"{v.name}-{n}" for n, v in enumerate(ZEROS)])
def test_zero_is_softmax_attention(kit, kind, variant):
    ids, mask = tokens(), torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    model = kit.model(kind)
    with torch.no_grad():
        plain, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    model = kit.equipped(kind, variant)
    with torch.no_grad():
        assert_close(model(ids).logits, plain)
        assert_close(model(ids, attention_mask=mask).logits[mask.bool()], padded[mask.bool()])


def test_zero_strength_alibi_and_soft_cap_up_to_rounding(kit):
    ids = tokens()
    for kind, variant in (("llama", Alibi(strength=0.0)), ("gemma2", Momentum(eta=0.0))):
        model = kit.model(kind, "sdpa" if kind == "llama" else "eager")
        with torch.no_grad():
            plain = model(ids).logits
            attach(model, variant)
            # Gemma's eager attention takes its softmax in float32 whatever the model's precision.
            torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=1e-12 if kind == "llama" else 1e-4)


def test_sinks_are_part_of_the_softmax(kit):
    """GPT-OSS: the explicit softmax with its sinks is the model's own."""
    shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
    config = tf.GptOssConfig(
        **shape,
        num_key_value_heads=2,
        intermediate_size=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
    )
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    with torch.no_grad():
        plain = model(tokens()).logits
        attach(model, Momentum(eta=0.0))
        torch.testing.assert_close(model(tokens()).logits, plain, rtol=1e-4, atol=1e-5)
        attach(model, Momentum(eta=0.5))
        assert not torch.allclose(model(tokens()).logits, plain, atol=1e-3)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"augmented"}))
def test_by_name_alone(kit, name):
    """`attn_implementation="dualview_…"` is the variant with its default setting."""
    register()
    kind = VARIANTS[name]
    by_name = kit.model("llama", implementation(kind))
    attached = kit.model("llama")
    attach(attached, kind())
    with torch.no_grad():
        assert_close(by_name(tokens()).logits, attached(tokens()).logits)


def test_augmented_by_name_alone_is_refused(kit):
    register()
    with pytest.raises(UserError, match="no adapters"):
        kit.model("llama", "dualview_augmented")(tokens())


def test_strict_form_with_declared_demonstrations(kit):
    """Row 0 has 2 pads, 3 demonstration tokens and 4 query tokens; row 1 has 6 and 3."""
    register()
    variant = Regularised(alpha=0.4, form="strict")
    draw = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, heads, 9, 3, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :2] = False
    module = torch.nn.Linear(1, 1)
    module.dualview = variant.equip(module, None, 0)
    attention = tf.AttentionInterface()[implementation(variant)]
    for lengths in (torch.tensor([3, 6]), 5):
        with demonstrations(module, lengths):
            out, _ = attention(module, query, key, value, kit.causal_mask(real), scaling=3**-0.5)
        for row, length in enumerate(torch.as_tensor(lengths).expand(2).tolist()):
            at = real[row]
            expected = kit.slow(variant, query[row][:, at], key[row][:, at], value[row][:, at], demos=length)
            torch.testing.assert_close(out[row][at], torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_declared_demonstrations_while_decoding(kit):
    model = kit.equipped("llama", Regularised(alpha=0.4, form="strict"))
    ids, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :2] = 0
    real = mask.bool()
    with torch.no_grad():
        own = model(ids, attention_mask=mask, position_ids=kit.positions(mask), use_cache=False).logits
        with demonstrations(model, torch.tensor([3, 6])):
            full = model(ids, attention_mask=mask, position_ids=kit.positions(mask), use_cache=False).logits
            steps = kit.decoded(model, ids, mask, None, [5, 8, 9])
        after = model(ids, attention_mask=mask, position_ids=kit.positions(mask), use_cache=False).logits
    torch.testing.assert_close(steps[real], full[real], rtol=0, atol=1e-11)
    assert not torch.allclose(own[real], full[real])  # undeclared, X_T is the token alone
    assert_close(after[real], own[real])


def test_demonstrations_wants_the_strict_form_and_matching_lengths(kit):
    model = kit.model("llama")
    attach(model, Regularised())
    with pytest.raises(UserError, match="strict"), demonstrations(model, 3):
        pass
    attach(model, Regularised(form="strict"))
    with pytest.raises(UserError, match="one per row"), demonstrations(model, torch.tensor([1, 2, 3])):
        model(tokens(2, 5))


def test_a_copied_model_is_its_own(kit):
    model = kit.equipped("gpt2", Augmented(rank=2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(tokens()).logits
        torch.testing.assert_close(twin(tokens()).logits, before)
        for parameter in variant_parameters(twin).values():
            parameter.add_(1.0)
        assert_close(model(tokens()).logits, before)
        assert not torch.allclose(twin(tokens()).logits, before)
        detach(twin)
        assert_close(twin(tokens()).logits, kit.model("gpt2")(tokens()).logits)


@pytest.mark.skipif(
    "DUALVIEW_ODD_ALIGNMENT" in os.environ, reason="torch.compile does not go with a hook on every module"
)
def test_compiles_in_one_graph(kit):
    model = kit.equipped("llama", Momentum(eta=0.7))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(tokens(), use_cache=False).logits, model(tokens(), use_cache=False).logits, rtol=0, atol=1e-12
        )
