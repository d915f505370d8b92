"""What `negative` and `token_shift` keep with a key-value cache: beams, several caches, gradients, copies."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import transformers as tf

from dualview.io.errors import UserError
from dualview.variants import Momentum, Negative, Regularised, TokenShift, attach, demonstrations, detach, register

CARRY = [Negative(beta=0.9, k=2), TokenShift(eta=0.9)]


def tokens(rows=1, length=12):
    return torch.randint(2, 40, (rows, length), generator=torch.Generator().manual_seed(7))


def whole(model, ids):
    return model(ids, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("variant", [Momentum(), *CARRY], ids=lambda v: v.name)
def test_beam_search_reorders_what_is_carried(kit, kind, static, variant):
    model = kit.equipped(kind, variant)
    asked = {"num_beams": 4, "max_new_tokens": 8, "do_sample": False}
    cached = {"cache_implementation": "static"} if static else {}
    with torch.no_grad():
        found = model.generate(tokens(2, 6), **asked, **cached)
        assert torch.equal(found, model.generate(tokens(2, 6), use_cache=False, **asked))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_beams_that_look_alike_in_the_window_keep_their_own_past(kit, static, variant):
    """The rows differ only before the window; after reordering each must go on with its own sums."""
    model = kit.equipped("gemma3", variant)
    ids = tokens(1, 9).repeat(3, 1)
    ids[:, :5] = torch.randint(2, 40, (3, 5), generator=torch.Generator().manual_seed(1))
    order, step = torch.tensor([2, 0, 0]), torch.tensor([[7], [8], [9]])
    cache = tf.StaticCache(config=model.config, max_cache_len=20) if static else tf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(2):
            cache.reorder_cache(order)
            ids = torch.cat([ids[order], step], 1)
            last = model(step, past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(last, whole(model, ids), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_two_sequences_in_turn_do_not_mix(kit, kind, variant):
    """The two have their last tokens in common, which is all that a window shows of them in the first layer."""
    model = kit.equipped(kind, variant)
    one, two = tokens(), tokens()
    two[:, :5] = torch.flip(two[:, :5], [1]) + 1
    with torch.no_grad():
        caches = [model(ids[:, :9], use_cache=True).past_key_values for ids in (one, two)]
        pairs = list(zip((one, two), caches, strict=True))
        for at in (9, 10, 11):
            for ids, cache in pairs:
                last = model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1]
                torch.testing.assert_close(last, whole(model, ids[:, : at + 1]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_decoding_with_gradients_is_the_full_pass_and_so_are_they(kit, kind, variant):
    model = kit.equipped(kind, variant)
    ids, found = tokens(2, 9), []
    full = model(ids, use_cache=False).logits
    steps = kit.decoded(model, ids, torch.ones_like(ids), None, list(range(1, 9)))
    torch.testing.assert_close(steps, full, rtol=0, atol=1e-11)
    for logits in (full, steps):
        model.zero_grad()
        logits.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_a_copied_cache_carries_on(kit, variant, mode):
    """One prompt, several continuations: the usual reuse of a prefix."""
    model = kit.equipped("mistral", variant)
    with mode():
        cache = model(tokens(1, 9), use_cache=True).past_key_values
        for step, held in ((7, copy.deepcopy(cache)), (8, copy.deepcopy(cache)), (9, cache)):
            ids = torch.cat([tokens(1, 9), torch.tensor([[step, 3]])], 1)
            model(ids[:, 9:10], past_key_values=held)
            held.reorder_cache(torch.tensor([0]))
            last = model(ids[:, 10:], past_key_values=held).logits[:, -1]
            torch.testing.assert_close(last, whole(model, ids), rtol=0, atol=1e-11)


@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_a_copy_is_reordered_by_itself(kit, variant):
    model, ids = kit.equipped("llama", variant), tokens(2, 9)
    step = torch.tensor([[7], [8]])
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        held = copy.deepcopy(cache)
        held.reorder_cache(torch.tensor([1, 0]))
        for own, read in ((held, ids.flip(0)), (cache, ids)):
            last = model(step, past_key_values=own).logits[:, -1]
            torch.testing.assert_close(last, whole(model, torch.cat([read, step], 1)), rtol=0, atol=1e-11)


@pytest.mark.parametrize("variant", [Momentum(), *CARRY], ids=lambda v: v.name)
def test_a_cache_that_is_no_longer_used_is_freed_at_once(kit, variant):
    """Without a search for cycles, which may come after a GPU is full."""
    model = kit.equipped("llama", variant)
    gc.disable()
    try:
        with torch.no_grad():
            cache = model(tokens(1, 9), use_cache=True).past_key_values
            model(tokens(1, 1), past_key_values=cache)
        left = [weakref.ref(layer) for layer in cache.layers]
        del cache
        assert not [layer for layer in left if layer() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_the_model_itself_keeps_nothing(kit, variant):
    model = kit.equipped("mistral", variant)
    with torch.no_grad():
        model(tokens(), use_cache=True)
    left = [name for m in model.modules() for name in vars(m) if name.startswith("dualview")]
    assert not left
    detach(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def _filled_without(model, variant):
    detach(model)
    cache = model(tokens(1, 9), use_cache=True).past_key_values
    attach(model, variant)
    return cache


def _filled_by_another_setting(model, variant):
    attach(model, TokenShift(eta=0.1))
    cache = model(tokens(1, 9), use_cache=True).past_key_values
    attach(model, variant)
    return cache


def _continued_without(model, variant):
    cache = model(tokens(1, 9), use_cache=True).past_key_values
    detach(model)
    model(tokens(1, 1), past_key_values=cache)
    attach(model, variant)
    return cache


def _continued_without_in_place(model, variant):
    cache = tf.StaticCache(config=model.config, max_cache_len=20)
    model(tokens(1, 9), past_key_values=cache)
    detach(model)
    model(tokens(1, 1), past_key_values=cache)
    attach(model, variant)
    return cache


def _recording(model, _variant):
    """As assisted decoding does: the cache keeps more than it returns, until it is cropped."""
    cache = tf.DynamicCache(config=model.config)
    for layer in cache.layers:
        getattr(layer, "activate_past_recording", lambda: None)()
    return model(tokens(1, 9), past_key_values=cache).past_key_values


def _selected(model, _variant):
    cache = model(tokens(2, 9), use_cache=True).past_key_values
    cache.batch_select_indices(torch.tensor([0]))
    return cache


def _selected_and_reordered(model, variant):
    cache = _selected(model, variant)
    cache.reorder_cache(torch.tensor([0]))
    return cache


@pytest.mark.parametrize(
    "fill",
    [
        _filled_without,
        _filled_by_another_setting,
        _continued_without,
        _continued_without_in_place,
        _recording,
        _selected,
        _selected_and_reordered,
    ],
)
@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_a_window_whose_past_is_not_known_is_refused(kit, variant, fill):
    """And without a window, where everything can be computed again, it is."""
    model = kit.equipped("mistral", variant)
    with torch.no_grad():
        cache = fill(model, variant)
        with pytest.raises(UserError, match="use_cache=False"):
            model(tokens(1, 1), past_key_values=cache)
    model = kit.equipped("gpt2", variant)
    with torch.no_grad():
        cache = fill(model, variant)
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("variant", CARRY, ids=lambda v: v.name)
def test_a_cropped_cache_is_computed_again(kit, variant):
    model = kit.equipped("llama", variant)
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
        cache.crop(-3)
        last = model(tokens()[:, 9:10], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(last, whole(model, tokens()[:, :10]), rtol=0, atol=1e-11)


def test_by_name_alone_a_window_is_refused_and_the_sentence_says_attach(kit):
    register()
    model = kit.model("mistral", "dualview_negative")
    with torch.no_grad():
        cache = model(tokens(1, 9), use_cache=True).past_key_values
        with pytest.raises(UserError, match="use attach"):
            model(tokens(1, 1), past_key_values=cache)


def test_declared_demonstrations_cannot_leave_the_window(kit):
    model = kit.equipped("mistral", Regularised(form="strict"))
    with torch.no_grad(), demonstrations(model, 2):
        cache = model(tokens(1, 9), use_cache=True).past_key_values
        with pytest.raises(UserError, match="use_cache=False"):
            model(tokens(1, 1), past_key_values=cache)
