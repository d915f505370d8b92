"""attach, detach, parameters, saving, refusals, and the augmented variant's module surgery."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers as tf

from close import assert_close, assert_same_weights, is_close
from dualview.io.errors import UserError
from dualview.variants import (
    VARIANTS,
    Augmented,
    Linear,
    Momentum,
    Negative,
    Regularised,
    Sign,
    TokenShift,
    attach,
    detach,
    load,
    variant_parameters,
)

LEARNABLE = [
    Momentum(eta=0.3, learnable=True),
    Sign(learnable=True, per="head"),
    Regularised(learnable=True, per="head"),
    Augmented(rank=2, learnable=True, per="head"),
    Negative(learnable=True),
    Linear(learnable=True, average=True),
    TokenShift(learnable=True, per="head"),
]


def tokens(length=9):
    return torch.randint(2, 40, (2, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("variant", LEARNABLE, ids=lambda v: v.name)
def test_learnable_coefficients_are_parameters_of_every_layer(kit, variant, tmp_path):
    model = kit.model("llama")
    bare = set(model.state_dict())
    attach(model, variant)
    added = variant_parameters(model)
    symbols = [name for name in added if not name.endswith("weight")]
    assert set(model.state_dict()) == bare | set(added)
    assert len(symbols) == 2 and all(".self_attn.dualview." in name for name in symbols)
    assert all(added[name].shape == ((2,) if variant.per == "head" else ()) for name in symbols)
    assert all(added[name].dtype == torch.float64 for name in added)

    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in added.items()}
    for _ in range(2):  # adapters start with W_2 = 0, which leaves W_1 and c without a gradient at first
        optimiser.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        optimiser.step()
    for name, parameter in added.items():
        assert not torch.equal(parameter, before[name]), name

    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float64)
    assert again.model.layers[0].self_attn.dualview.variant == variant
    assert_same_weights(again, model)
    with torch.no_grad():
        assert_close(again.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_a_fixed_coefficient_adds_nothing_to_the_state_dict(kit):
    model = kit.model("llama")
    bare = list(model.state_dict())
    attach(model, Momentum(eta=0.9))
    assert list(model.state_dict()) == bare
    assert model.config.dualview == {"name": "momentum", "learnable": False, "per": "layer", "eta": 0.9}


def test_attaching_again_replaces_and_detaching_restores(kit):
    model = kit.model("llama")
    bare, names = model(tokens()).logits, set(model.state_dict())
    attach(model, Augmented(rank=2))
    attach(model, Momentum(learnable=True))
    assert not any("g1" in name for name in model.state_dict())
    assert model.config._attn_implementation == "dualview_momentum"
    detach(model)
    detach(model)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "dualview")
    assert set(model.state_dict()) == names
    assert_close(model(tokens()).logits, bare)


def test_weights_in_several_files_are_read_back(kit, tmp_path):
    model = kit.equipped("llama", Augmented(rank=2, learnable=True, per="head"))
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = load(tmp_path, dtype=torch.float64)
    assert_same_weights(again, model)
    with torch.no_grad():
        assert_close(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("training", [False, True])
def test_what_is_attached_takes_the_mode_of_the_model(kit, training):
    model = kit.model("llama").train(training)
    attach(model, Augmented(rank=2))
    assert {m.training for m in model.modules()} == {training}


def test_attention_dropout_is_the_models_own(kit):
    """With the same draw, a coefficient of 0 drops what `sdpa` drops."""
    model = kit.model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.5
    quiet = model(tokens()).logits
    found = []
    model.train()
    for variant in (None, Momentum(eta=0.0)):
        if variant is not None:
            attach(model, variant)
        torch.manual_seed(3)
        found.append(model(tokens()).logits)
    assert_close(*found)
    assert not torch.allclose(found[0], quiet, atol=1e-3)


def hooks(model):
    return [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


def state(model):
    return model.config._attn_implementation, getattr(model.config, "dualview", None), sorted(model.state_dict())


class FailsAtTheLastLayer(Augmented):
    def equip(self, attention, layer, index):
        if index == 1:
            raise UserError("not this one")
        return super().equip(attention, layer, index)


def _deepseek():
    shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.DeepseekV3Config(
        **shape,
        intermediate_size=24,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=2,
    )
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


FAILING = [(lambda kit: kit.model("llama"), FailsAtTheLastLayer(rank=2)), (lambda _: _deepseek(), Augmented(rank=2))]


@pytest.mark.parametrize("had", [None, Momentum(eta=0.3, learnable=True), Negative(), Augmented(rank=2, keys=False)])
@pytest.mark.parametrize(("make", "variant"), FAILING, ids=["last-layer", "deepseek"])
def test_attach_is_all_or_nothing(kit, make, variant, had):
    model = make(kit)
    if had is not None:
        attach(model, had)
    with torch.no_grad():
        for parameter in variant_parameters(model).values():
            parameter.add_(0.1)
        logits, before, hooked = model(tokens()).logits, state(model), hooks(model)
        with pytest.raises(UserError):
            attach(model, variant)
        assert state(model) == before and hooks(model) == hooked
        assert_close(model(tokens()).logits, logits)
        detach(model)
    assert not hooks(model) and model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_take_the_implementation_is_left_as_it_was(kit, monkeypatch):
    model = kit.model("llama")
    attach(model, Augmented(rank=2))
    before, hooked = state(model), hooks(model)
    real = type(model).set_attn_implementation

    def deaf(self, name):
        if name != "dualview_momentum":
            real(self, name)

    monkeypatch.setattr(type(model), "set_attn_implementation", deaf)
    with pytest.raises(UserError, match="did not take"):
        attach(model, Momentum())
    assert state(model) == before and hooks(model) == hooked


def test_models_that_share_a_config_do_not_share_a_variant(kit):
    config = kit.configs["llama"]()
    a, b, c = (tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval() for _ in range(3))
    assert a.config is b.config
    with torch.no_grad():
        plain = b(tokens()).logits
        attach(a, Momentum())
        assert_close(b(tokens()).logits, plain)
        attach(b, Negative())
        changed = b(tokens()).logits
        detach(a)
        detach(c)
        assert b.config.dualview["name"] == "negative" and is_close(b(tokens()).logits, changed)
        d = type(b)(b.config).eval()  # built on the config of a model that has a variant
        by_name = d(tokens()).logits
        detach(d)
        assert b.config.dualview["name"] == "negative"
        detach(b)
        assert_close(d(tokens()).logits, by_name)
        assert_close(b(tokens()).logits, plain)
    assert all(m.config is b.config for m in b.modules() if "config" in vars(m))


def test_changing_the_implementation_behind_its_back_is_noticed(kit):
    model = kit.model("llama")
    attach(model, Momentum())
    model.set_attn_implementation("dualview_sign")
    with pytest.raises(UserError, match="attach"):
        model(tokens())


def test_settings_survive_a_round_trip():
    for kind in VARIANTS.values():
        assert kind.from_dict(kind().to_dict()) == kind()


# Where each architecture keeps k and v in its projections' outputs, written down by hand: [.., head, d_head] views.
def _separate(attention, which):
    return getattr(attention, f"{which}_proj"), lambda out: out.unflatten(-1, (2, 4))


def _gpt2(attention, which):
    at = {"k": 1, "v": 2}[which]
    return attention.c_attn, lambda out: out.unflatten(-1, (3, 4, 4))[..., at, :, :]


def _neox(attention, which):
    at = {"k": 1, "v": 2}[which]
    return attention.query_key_value, lambda out: out.unflatten(-1, (4, 3, 4))[..., at, :]


def _phi3(attention, which):
    start = {"k": 16, "v": 24}[which]
    return attention.qkv_proj, lambda out: out[..., start : start + 8].unflatten(-1, (2, 4))


@pytest.mark.parametrize(
    ("kind", "where"),
    [("llama", _separate), ("qwen3", _separate), ("gpt2", _gpt2), ("gpt_neox", _neox), ("phi3", _phi3)],
)
@pytest.mark.parametrize("sides", ["v", "k", "vk"])
def test_adapters_act_on_keys_and_values_alone(kit, kind, where, sides):
    model = kit.model(kind)
    variant = Augmented(
        c=0.7, rank=3, values="v" in sides, keys="k" in sides, activation="tanh", learnable=True, per="head"
    )
    attach(model, variant)
    attention = next(m for m in model.modules() if hasattr(m, "dualview"))
    equipment = attention.dualview
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        equipment.c.copy_(torch.linspace(0.2, 0.9, len(equipment.c)))
        for name in ("g1", "g2"):
            if hasattr(equipment, name):
                up = getattr(equipment, name).up.weight
                up.copy_(torch.randn(up.shape, generator=draw, dtype=torch.float64))
    x = torch.randn(2, 5, 16, generator=draw, dtype=torch.float64)
    rest_before = {}
    for which in "kv":
        projection, view = where(attention, which)
        plain = torch.nn.Module.__getattribute__(projection, "forward")(x)  # without hooks
        with torch.no_grad():
            changed = projection(x)
        expected = view(plain).clone()
        if which in sides:
            adapter = getattr(equipment, {"v": "g1", "k": "g2"}[which])
            added = torch.tanh(x @ adapter.down.weight.T) @ adapter.up.weight.T
            expected = expected + equipment.c[:, None] * added.reshape(expected.shape)
        torch.testing.assert_close(view(changed), expected, rtol=0, atol=1e-12)
        rest_before[which] = (changed - plain).abs()
    if kind in ("gpt2", "gpt_neox", "phi3"):  # the fused matrix also makes the queries: those stay
        changed = int((rest_before["k"].amax((0, 1)) > 1e-9).sum())
        assert changed == len(sides) * (8 if kind == "phi3" else 16)


def test_adapters_start_as_the_model_itself_and_the_seed_is_theirs(kit):
    def first_weights(seed):
        torch.manual_seed(int(torch.randint(1000, ())))
        model = kit.model("gpt2")
        plain = model(tokens()).logits
        attach(model, Augmented(seed=seed))
        assert_close(model(tokens()).logits, plain)
        return torch.cat([p.flatten() for p in variant_parameters(model).values()])

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))
    model = kit.model("gpt2")
    attach(model, Augmented())
    a, b = (block.attn.dualview.g1.down.weight for block in model.transformer.h)
    assert not torch.equal(a, b)


def test_nothing_imports_torch_before_a_name_is_used():
    program = "import sys, dualview.variants; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
    import dualview.variants

    with pytest.raises(AttributeError, match="no attribute"):
        _ = dualview.variants.nonsense
    assert all(hasattr(dualview.variants, name) for name in dualview.variants.__all__)
