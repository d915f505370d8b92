"""attach, detach, parameters, saving, refusals, and the augmented variant's module surgery."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers as tf

from dualview.errors import UserError
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
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_learnt_eta_never_leaves_the_interval(kit):
    model = kit.model("gpt2")
    attach(model, Momentum(eta=0.25, learnable=True))
    equipment = model.transformer.h[0].attn.dualview
    torch.testing.assert_close(equipment.coefficient(), torch.tensor(0.25, dtype=torch.float64))
    with torch.no_grad():
        equipment.eta_logit.fill_(500.0)
        assert float(equipment.coefficient()) <= 1
        assert model(tokens()).logits.isfinite().all()


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
    assert torch.equal(model(tokens()).logits, bare)


def test_a_model_saved_without_a_variant_is_refused(kit, tmp_path):
    kit.model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="from_pretrained"):
        load(tmp_path)


def test_changing_the_implementation_behind_its_back_is_noticed(kit):
    model = kit.model("llama")
    attach(model, Momentum())
    model.set_attn_implementation("dualview_sign")
    with pytest.raises(UserError, match="attach"):
        model(tokens())


INLINE = {
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=40, hidden_size=16, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    ),
    "gptj": lambda: tf.GPTJConfig(vocab_size=40, n_embd=16, n_layer=2, n_head=4, rotary_dim=4),
    "bloom": lambda: tf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=4),
    "falcon": lambda: tf.FalconConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4),
    "mpt": lambda: tf.MptConfig(vocab_size=40, d_model=16, n_layers=2, n_heads=4),
    "codegen": lambda: tf.CodeGenConfig(vocab_size=40, n_embd=16, n_layer=2, n_head=4, rotary_dim=4),
    "xglm": lambda: tf.XGLMConfig(vocab_size=40, d_model=16, num_layers=2, attention_heads=4, ffn_dim=16),
}


@pytest.mark.parametrize("kind", sorted(INLINE))
def test_models_that_bypass_the_interface_are_refused(kind):
    model = tf.AutoModelForCausalLM.from_config(INLINE[kind]())
    with pytest.raises(UserError, match="inline"):
        attach(model, Momentum())
    assert "dualview" not in "".join(name for name, _ in model.named_modules())


def test_encoders_and_other_objects_are_refused():
    bert = tf.BertModel(tf.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(UserError, match="not causal"):
        attach(bert, Momentum())
    with pytest.raises(UserError, match="Hugging Face"):
        attach(torch.nn.Linear(2, 2), Momentum())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Momentum(eta=1.0), "eta must lie in"),
        (lambda: Momentum(eta=-0.1), "eta must lie in"),
        (lambda: TokenShift(eta=0.0, learnable=True), "start inside"),
        (lambda: Momentum(eta=float("nan")), "finite"),
        (lambda: Momentum(eta="0.5"), "finite number"),
        (lambda: Momentum(per="token"), "'layer' or 'head'"),
        (lambda: Negative(k=0), "at least 1"),
        (lambda: Negative(k=1.5), "at least 1"),
        (lambda: Sign(scale="row"), "'constant', 'sequence' or 'token'"),
        (lambda: Regularised(form="loose"), "'slides' or 'strict'"),
        (lambda: Augmented(rank=0), "rank"),
        (lambda: Augmented(values=False, keys=False), "neither"),
        (lambda: Augmented(activation="cube"), "activation"),
        (lambda: Momentum.from_dict({"name": "momentum", "zeta": 1}), "no setting zeta"),
    ],
)
def test_bad_settings(make, says):
    with pytest.raises(UserError, match=says):
        make()


def test_soft_caps_have_no_linear_form(kit):
    model = kit.model("gemma2", "eager")
    attach(model, Linear())
    with pytest.raises(UserError, match="without the softmax"):
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
        changed = int((rest_before["k"].amax((0, 1)) > 0).sum())
        assert changed == len(sides) * (8 if kind == "phi3" else 16)


def test_adapters_start_as_the_model_itself_and_the_seed_is_theirs(kit):
    def first_weights(seed):
        torch.manual_seed(int(torch.randint(1000, ())))
        model = kit.model("gpt2")
        plain = model(tokens()).logits
        attach(model, Augmented(seed=seed))
        assert torch.equal(model(tokens()).logits, plain)
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
