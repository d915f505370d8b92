"""What is refused, and in which words: models, settings, arguments, folders."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

from dualview.io.errors import UserError
from dualview.variants import (
    Augmented,
    Linear,
    Momentum,
    Negative,
    Regularised,
    Sign,
    TokenShift,
    apply,
    attach,
    demonstrations,
    detach,
    implementation,
    load,
    register,
)


def tokens(length=9):
    return torch.randint(2, 40, (2, length), generator=torch.Generator().manual_seed(7))


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
        (lambda: Negative(k=0), "k must be greater than or equal to 1"),
        (lambda: Negative(k=1.5), "k must be a valid integer"),
        (lambda: Sign(scale="row"), "'constant', 'sequence' or 'token'"),
        (lambda: Regularised(form="loose"), "'slides' or 'strict'"),
        (lambda: Augmented(rank=0), "rank"),
        (lambda: Augmented(values=False, keys=False), "neither"),
        (lambda: Augmented(activation="cube"), "activation"),
        (lambda: Momentum.from_dict({"name": "momentum", "zeta": 1}), "no setting zeta"),
        (lambda: Momentum.from_dict({"name": "momentum", "eta": [1]}), "finite number"),
        (lambda: Augmented(rank=2.5), "rank must be a valid integer"),
        (lambda: Augmented(rank="8"), "valid integer"),
        (lambda: Augmented(rank=True), "valid integer"),
        (lambda: Augmented(seed=0.5), "seed"),
        (lambda: Augmented(values="yes"), "valid boolean"),
        (lambda: Linear(bare=1), "valid boolean"),
        (lambda: Momentum(learnable="no"), "valid boolean"),
        (lambda: Momentum(per="head"), "learnable=True"),
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


@pytest.mark.parametrize("given", ["momentum", None, Momentum, 3])
def test_what_is_no_variant(kit, given):
    with pytest.raises(UserError, match=r"such as Momentum\(eta=0.5\)"):
        attach(kit.model("llama"), given)
    with pytest.raises(UserError, match="apply needs a variant"):
        apply(given, *torch.randn(3, 1, 1, 4, 2))


def test_what_is_no_model():
    with pytest.raises(UserError, match="detach needs a Hugging Face model, not Linear"):
        detach(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("given", [1.5, 1, -0.1, float("nan"), "0.5", True])
def test_a_coefficient_outside_its_interval(given):
    with pytest.raises(UserError, match="eta must"):
        apply(Momentum(), *torch.randn(3, 1, 1, 4, 2), coefficient=given)


@pytest.mark.parametrize("variant", [Momentum(learnable=True, per="head"), Augmented()], ids=lambda v: v.name)
def test_without_a_head_the_layers_cannot_be_found(kit, variant):
    model = kit.model("llama").model
    with pytest.raises(UserError, match="no language-model head"):
        attach(model, variant)
    attach(model, Momentum(learnable=True))  # needs to know nothing of the layers


@pytest.mark.parametrize("variant", [Augmented(), Momentum(learnable=True)], ids=lambda v: v.name)
def test_parameters_made_in_inference_mode_could_not_be_trained(kit, variant):
    model = kit.model("llama")
    with torch.inference_mode():
        with pytest.raises(UserError, match="inference_mode"):
            attach(model, variant)
        attach(model, Momentum())


@pytest.mark.parametrize(
    "length", ["3", -3, 2.5, None, True, torch.tensor([1.0]), torch.tensor([2, -1]), torch.ones(1, 2, dtype=torch.long)]
)
def test_lengths_of_demonstrations(kit, length):
    model = kit.equipped("llama", Regularised(form="strict"))
    with pytest.raises(UserError, match="whole number of tokens"), demonstrations(model, length):
        pass


@pytest.mark.parametrize("name", ["indices", "block_indices", "block_mask", "attn_bias", "attention_bias", "cache"])
def test_arguments_that_change_what_is_read(name):
    register()
    attention = tf.AttentionInterface()[implementation(Momentum)]
    query = torch.randn(1, 1, 4, 2)
    with pytest.raises(UserError, match=f"passes {name}"):
        attention(torch.nn.Identity(), query, query, query, None, **{name: torch.zeros(1)})


def test_a_model_saved_without_a_variant_is_refused(kit, tmp_path):
    kit.model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="from_pretrained"):
        load(tmp_path)


def test_folders_that_hold_no_model(kit, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load("/nonexistent")
    model = kit.equipped("llama", Momentum(learnable=True))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for strange in ("momentum", ["momentum"], {"name": "momentums"}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dualview": strange}))
        with pytest.raises(UserError, match="no known attention variant"):
            load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks the weights model\.safetensors"):
        load(tmp_path)
