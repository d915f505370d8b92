"""Log-probabilities, h, m and λ of every architecture against the slow reference, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import zoo
from close import assert_close
from dualview.models.language_model import LanguageModel
from dualview.models.scoring import Asked, PassPlan, ask
from equivalence import cases, reference


def check(got: Asked, expected: tuple[dict[str, reference.Answer], ...], at: str, tolerance: float) -> None:
    setting = got.settings[0]
    assert setting.h is not None and setting.m is not None and setting.demo_mass is not None
    assert len(expected) == len(setting.log_probs)
    for i, answers in enumerate(expected):
        right, width = answers[at], answers[at].m[0].shape[-1]
        scores = setting.log_probs[i]
        assert cases.worst(scores[: len(right.log_probs)], right.log_probs) < tolerance
        assert np.all(scores[len(right.log_probs) :] == -np.inf), "a candidate the query does not have"
        assert cases.worst(setting.h[i], right.h) < tolerance
        assert got.columns[i] == width, "the query's own tokens, without BOS and demonstrations"
        assert cases.worst(setting.m[i, :, :, :width], np.stack(right.m)) < tolerance
        assert not setting.m[i, :, :, width:].any()
        assert cases.worst(setting.demo_mass[i], np.stack(right.demo_mass)) < tolerance
        if got.demo_logits is not None:
            assert cases.worst(got.demo_logits[i], right.demo_logits) < tolerance


@pytest.mark.parametrize("at", ["prompt", "label0"])
@pytest.mark.parametrize("name", [*zoo.ZOO, *cases.MORE])
def test_every_record_is_the_reference(name: str, at: str) -> None:
    for prefix, (ids, special) in cases.PREFIXES.items():
        how = PassPlan(ids, special, at=at, demo_logits=True)  # pyright: ignore[reportArgumentType]
        check(ask(cases.lm(name), cases.QUERIES, how), cases.answers(name, prefix), at, cases.EXACT)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_slow_path_is_the_reference_too(name: str) -> None:
    # Gemma 2 knows no attention but its eager one, which softmaxes in float32: watched, not replaced, on this path.
    tolerance = 2e-6 if name == "gemma2-softcap" else cases.EXACT
    lm = replace(cases.lm(name), slow_because="it was told to")
    ids, special = cases.PREFIXES["demos"]
    some = cases.QUERIES[:2]
    for at in ("prompt", "label0"):
        got = ask(lm, some, PassPlan(ids, special, at=at, demo_logits=True))  # pyright: ignore[reportArgumentType]
        check(got, cases.answers(name, "demos")[:2], at, tolerance)


def test_only_architectures_that_mix_tokens_take_the_slow_path() -> None:
    for name in zoo.ZOO:
        said = cases.lm(name).slow_because
        assert (said is not None) == (name in zoo.HYBRID)
        if said is not None:
            assert "mixes tokens" in said


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in zoo.HYBRID])
def test_company_and_order_do_not_matter(name: str) -> None:
    lm = cases.lm(name)
    ids, special = cases.PREFIXES["demos"]
    together = ask(lm, cases.QUERIES, PassPlan(ids, special)).settings[0]
    for size in (1, 3):
        apart = ask(lm, cases.QUERIES, PassPlan(ids, special, batch_size=size)).settings[0]
        same(together, apart, range(len(cases.QUERIES)))
    order = [2, 0, 3, 1]
    turned = ask(lm, [cases.QUERIES[i] for i in order], PassPlan(ids, special, batch_size=2)).settings[0]
    same(together, turned, order)


def same(a, b, order) -> None:
    order = list(order)
    assert cases.worst(np.exp(a.log_probs[order]), np.exp(b.log_probs)) < 1e-12
    for what in ("h", "m", "demo_mass"):
        assert cases.worst(getattr(a, what)[order], getattr(b, what)) < 1e-12


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "lfm2-hybrid"])
def test_asking_leaves_the_model_as_it_was(name: str) -> None:
    model = cases.model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = torch.tensor([cases.DEMOS])
    with torch.no_grad():
        first = model(ids, use_cache=False).logits
        ask(cases.lm(name), cases.QUERIES, PassPlan(cases.DEMOS, 1))
        second = model(ids, use_cache=False).logits
    assert_close(first, second)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2-softcap", "gptj", "qwen3_next-hybrid"])
def test_without_records_the_scores_are_the_same(name: str) -> None:
    lm = cases.lm(name)
    for at in ("prompt", "label0"):
        plain = ask(lm, cases.QUERIES, PassPlan(cases.DEMOS, 1, at=at, record=False)).settings[0]  # pyright: ignore
        full = ask(lm, cases.QUERIES, PassPlan(cases.DEMOS, 1, at=at)).settings[0]  # pyright: ignore
        assert plain.h is None and plain.m is None and plain.demo_mass is None
        assert cases.worst(np.exp(plain.log_probs), np.exp(full.log_probs)) < 1e-12


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "xglm", "phi-parallel", "lfm2-hybrid"])
def test_a_shift_moves_the_query_and_nothing_else(name: str) -> None:
    query, shift = cases.QUERIES[0], 11
    start, stop = len(cases.DEMOS), len(cases.DEMOS) + len(query.ids)
    positions = [*range(start), *range(start + shift, stop + shift)]
    with torch.no_grad():
        seen = reference.run(cases.twin(name), [*cases.DEMOS, *query.ids], positions)
    got = ask(cases.lm(name), [query], PassPlan(cases.DEMOS, 1, shift=shift)).settings[0]
    right = [float(seen.log_probs[-1, candidate[0]]) for candidate in query.candidates]
    assert cases.worst(got.log_probs[0], right) < cases.EXACT
    assert got.h is not None and got.m is not None
    assert cases.worst(got.h[0], np.stack([layer.h[-1].numpy() for layer in seen.layers])) < cases.EXACT
    rows = np.stack([layer.logits[:, -1, start:].numpy() for layer in seen.layers])
    assert cases.worst(got.m[0], rows) < cases.EXACT


def test_a_long_query_behind_a_window_sees_none_of_the_prefix() -> None:
    lm = cases.lm("mistral-window")
    assert lm.anatomy is not None
    got = ask(lm, cases.QUERIES, PassPlan(cases.DEMOS, 1)).settings[0]
    assert got.demo_mass is not None
    assert len(cases.QUERIES[1].ids) > 7  # the window
    assert not got.demo_mass[1].any()
    assert got.demo_mass[0].all()


@pytest.mark.parametrize("name", cases.ALIBI)
def test_alibi_of_odd_slopes_over_a_long_prefix(name: str) -> None:
    """Falcon keeps slope · position in bfloat16, so beyond position 256 it comes in steps; the records follow them."""
    prefix = (cases.BOS, *cases.tokens(280, 20))
    query = cases.QUERIES[1]
    answers = (reference.answer(cases.twin(name), prefix, 1, query.ids, query.candidates[:2]),)
    short = replace(query, candidates=query.candidates[:2])
    got = ask(cases.lm(name), [short], PassPlan(prefix, 1, demo_logits=True))
    check(got, answers, "prompt", cases.EXACT)


def test_one_prompt_is_all_special() -> None:
    """λ counts demonstrations only: a prefix that is nothing but BOS has none, though BOS draws attention."""
    got = ask(cases.lm("llama"), cases.QUERIES, PassPlan((cases.BOS,), 1)).settings[0]
    counted = ask(cases.lm("llama"), cases.QUERIES, PassPlan((cases.BOS,), 0)).settings[0]
    assert got.demo_mass is not None and counted.demo_mass is not None
    assert not got.demo_mass.any()
    assert (counted.demo_mass > 0).all()


def test_a_language_model_says_what_it_is() -> None:
    lm = cases.lm("llama")
    assert isinstance(lm, LanguageModel) and lm.fast
    assert (lm.vocab, lm.context, lm.dtype) == (zoo.VOCAB, 128, torch.float64)
