"""Signed values: the spared token, the sink's numbers, the summary, and the lab on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualview.io.errors import UserError
from dualview.lab import harness as frame
from dualview.lab.gpt.corpus import read_source
from dualview.lab.harness import LabResult
from dualview.lab.sign.report import figures, summarise, tables
from dualview.lab.sign.run import sign
from dualview.lab.sign.values import Muted, SparingSign, observe_sink, text_rows
from dualview.models.language_model import LanguageModel
from dualview.models.loading import load_model
from dualview.variants import Sign, apply, attach, detach
from equivalence.tiny import FILL, save_model, save_task

DRAW = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, heads, 9, 4, generator=DRAW, dtype=torch.float64) for heads in (4, 2, 2))


_WRITE_FIGURES = frame._write_figures


@pytest.fixture(autouse=True, scope="module")
def without_figures():
    """Drawing takes longer than the trainings; one test draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "_write_figures", lambda _figures, _folder: [])
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sign")
    save_model(folder / "model")
    save_task(folder / "task")
    draw = np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choice(FILL, 90)) for _ in range(200)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def lm(place: Path) -> LanguageModel:
    return load_model(str(place / "model"), dtype="float64", device="cpu")


def _by_hand(scale: str, alpha: float, spared: int | None, muted: bool) -> np.ndarray:
    """Loops over batch, head and token."""
    q, k, v = (x.numpy() for x in (Q, K, V))
    out = np.zeros((2, 9, 4, 4))
    for b, h, t in np.ndindex(2, 4, 9):
        g = h // 2
        logits = np.array([q[b, h, t] @ k[b, g, i] / 2 for i in range(t + 1)])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        mean = np.mean([np.abs(v[b, g, i]).mean() for i in range(t + 1)])
        for i in range(t + 1):
            factor = {"constant": 1.0, "sequence": mean, "token": np.abs(v[b, g, i]).mean()}[scale]
            value = alpha * factor * np.sign(v[b, g, i])
            if i == spared:
                value = 0.0 if muted else v[b, g, i]
            out[b, t, h] += weights[i] * value
    return out


@pytest.mark.parametrize("scale", ["constant", "sequence", "token"])
@pytest.mark.parametrize(("spared", "muted"), [(0, False), (0, True), (5, False), (30, False)])
def test_sparing_is_what_it_says(scale, spared, muted):
    variant = SparingSign(alpha=0.7, scale=scale, spared=spared, muted=muted)
    found = apply(variant, Q, K, V).numpy()
    np.testing.assert_allclose(found, _by_hand(scale, 0.7, spared, muted), atol=1e-12)
    if spared == 30:  # no such token
        np.testing.assert_allclose(found, apply(Sign(alpha=0.7, scale=scale), Q, K, V).numpy(), atol=1e-12)


def test_muting_takes_one_value_away():
    silent = V.clone()
    silent[:, :, 3] = 0
    found = apply(Muted(spared=3), Q, K, V)
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, silent, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("variant", [SparingSign(scale="sequence"), SparingSign(scale="token", muted=True), Muted()])
def test_behind_a_cache_it_is_the_full_pass(lm: LanguageModel, variant):
    ids = torch.arange(3, 19)[None]
    attach(lm.model, variant)
    try:
        with torch.no_grad():
            full = lm.model(input_ids=ids).logits
            first = lm.model(input_ids=ids[:, :9], use_cache=True)
            rest = lm.model(input_ids=ids[:, 9:], past_key_values=first.past_key_values, use_cache=True).logits
    finally:
        detach(lm.model)
    torch.testing.assert_close(rest, full[:, 9:], atol=1e-9, rtol=0)


def test_the_sink_is_seen_as_hugging_face_sees_it(lm: LanguageModel):
    rows = torch.randint(3, 30, (3, 13), generator=torch.Generator().manual_seed(1))
    report = observe_sink(lm, rows)
    values: list[torch.Tensor] = []
    hooks = [
        block.self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out))
        for block in lm.model.model.layers
    ]
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = lm.model(input_ids=rows[:, :-1], output_attentions=True).attentions
    lm.model.set_attn_implementation("sdpa")
    for hook in hooks:
        hook.remove()
    for layer, (a, v) in enumerate(zip(maps, values, strict=True)):
        v = v.view(3, 12, 2, -1).transpose(1, 2)
        norm = v.norm(dim=-1)
        assert report.mass[layer] == pytest.approx(float(a[:, :, 1:, 0].mean()))
        ratios = [n[0] / n[1:].median() for row in norm for n in row]
        assert report.value[layer] == pytest.approx(float(torch.stack(ratios).mean()))
        added = a * norm.repeat_interleave(2, 1)[:, :, None]
        assert report.share[layer] == pytest.approx(float((added[..., 0] / added.sum(-1))[:, :, 1:].mean()))
        np.testing.assert_allclose(report.size[layer], v[:, :, 1:].abs().mean((0, 2, 3)))
    assert report.even == pytest.approx(np.mean([1 / n for n in range(2, 13)]))


def test_rows_come_from_as_many_documents_as_there_are(lm: LanguageModel):
    documents = [" ".join([word] * 40) for word in ("the", "film", "was")]
    rows = text_rows(lm, documents, 3, 9)
    assert rows.shape == (3, 10) and len(set(rows[:, 1].tolist())) == 3
    assert (rows[:, 0] == lm.tokenizer.bos_token_id).all()
    many = text_rows(lm, documents, 8, 9)
    assert len(many) == 8 and len({tuple(row) for row in many.tolist()}) == 3
    assert len(text_rows(lm, documents, 100, 9)) == 12  # four pieces of nine words each, and no more
    assert text_rows(lm, ["the"], 2, 9).shape == (0, 10)


def _found(scale: str, spared: str, losses: list[float]) -> dict[str, Any]:
    rest = {"chance": 0.5, "zsl": 0.5, "icl": [0.5], "right": [[1, 0]], "shots_used": [2], "constant_draws": 0}
    return {"scale": scale, "spared": spared, "loss": float(np.mean(losses)), "rows": losses, **rest}


LAYERS = {"mass": [0.5, 0.7], "value": [0.2, 0.1], "share": [0.1, 0.1], "size": [[1.0], [1.0]], "even": 0.02}


def _planted(
    sink: float, placebo: float, zeroed: float | None = None, own: float = 0.0, pieces: int = 12
) -> list[dict[str, Any]]:
    """Losses in which sparing takes away such parts of the damage, on top of noise that all conditions share."""
    noise = np.random.default_rng(0).standard_normal(pieces)

    def losses(level: float) -> list[float]:
        return [float(x) for x in 4 + noise + level]

    made = [_found("none", "nothing", losses(0)), _found("none", "sink zeroed", losses(0.5))]
    for scale, damage in (("constant", 10.0), ("head", 6.0), ("sequence", 6.0), ("token", 3.0)):
        gains = {"nothing": 0.0, "sink": sink, "sink zeroed": zeroed or 0.9 * sink, "another token": placebo}
        if scale == "token":
            gains = {**dict.fromkeys(gains, 0.0), "sink": own}
        made += [_found(scale, spared, losses(damage * (1 - gain))) for spared, gain in gains.items()]
    return made


def _explained(found: list[dict[str, Any]], **layers: Any) -> tuple[str, list[str]]:
    """The verdict, and the names of the predictions that fail."""
    told = summarise(found, {**LAYERS, **layers})["explanation"]
    assert f"The sink explanation {told['verdict']} here." in told["sentence"]
    return told["verdict"], [each["name"] for each in told["predictions"] if not each["holds"]]


def test_what_was_planted_is_recovered():
    found = summarise(_planted(0.5, 0.01), LAYERS)
    assert found["recovered"]["sequence"]["sink"]["value"] == pytest.approx(0.5)
    assert found["recovered"]["head"]["another token"]["value"] == pytest.approx(0.01)
    assert found["recovered"]["token"]["sink"]["value"] == pytest.approx(0.0)
    assert found["gap"]["sequence"]["value"] == pytest.approx(1.0)  # 6 − 3 against 3 − 3
    assert found["gap"]["constant"]["value"] == pytest.approx(1 - 2 / 7)


def test_the_sink_explanation_holds_if_all_it_predicts_does():
    assert _explained(_planted(0.5, 0.01)) == ("holds", [])
    assert _explained(_planted(0.5, 0.01, zeroed=0.1)) == ("holds in part", ["zeroed"])
    assert _explained(_planted(0.5, 0.01, own=0.9)) == ("holds in part", ["own scale"])
    assert _explained(_planted(0.5, 0.01, zeroed=0.1, own=0.9)) == ("does not hold", ["own scale", "zeroed"])


def test_without_a_sink_that_matters_it_does_not_hold():
    assert _explained(_planted(0.5, 0.01), mass=[0.01, 0.01]) == ("does not hold", ["attention"])
    assert _explained(_planted(0.5, 0.01), value=[3.0, 3.0]) == ("does not hold", ["value"])
    assert _explained(_planted(0.2, 0.2)) == ("does not hold", ["another"])
    assert _explained(_planted(-0.1, 0.0))[0] == "does not hold"
    everywhere = _planted(0.0, 0.0)
    for each in everywhere:  # a nat less wherever the first token is spared, the token's own scale among them
        if each["spared"] == "sink":
            each["rows"] = [loss - 1 for loss in each["rows"]]
    verdict, failed = _explained(everywhere, mass=[0.01, 0.01], value=[3.0, 3.0])
    assert verdict == "does not hold" and failed == ["attention", "value", "own scale", "zeroed"]


def test_what_cannot_be_tested_is_told():
    told = summarise(_planted(0.5, 0.01, pieces=1), LAYERS)["explanation"]
    assert told["verdict"] is None and "one piece of text" in told["sentence"]
    none = [{**each, "rows": [4.0, 5.0]} for each in _planted(0.0, 0.0)]
    assert "no damage" in summarise(none, LAYERS)["explanation"]["sentence"]


def _options(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(place / "model"), "text": place / "text.txt", "task": str(place / "task" / "tiny.yaml"),
        "rows": 3, "length": 24, "calibration": 2, "shots": 3, "n_queries": 5, "device": "cpu", **more,
    }  # fmt: skip


def test_the_lab_on_a_tiny_model(place: Path, monkeypatch):
    monkeypatch.setattr(frame, "_write_figures", _WRITE_FIGURES)
    first = sign(out=place / "out", json=place / "sign.json", **_options(place))
    told = json.loads((place / "sign.json").read_text())
    assert set(told) == {"lab", "settings", "seeds", "results", "provenance"}
    assert len(told["results"]["conditions"]) == 18 and not list((place / "out").glob(".state-*"))
    again = sign(**_options(place))
    assert again.results == first.results and first.seeds == [1, 2]
    read = LabResult.load(place / "out" / "sign.json")
    assert "\n\n".join(t.markdown() for t in tables(read)) in (place / "out" / "sign.md").read_text()
    assert set(figures(read)) == {path.stem for path in (place / "out").glob("*.png")} == {"sign"}
    by = {(c["scale"], c["spared"]): c["loss"] for c in told["results"]["conditions"]}
    assert len({round(loss, 9) for loss in by.values()}) == 18  # each does something of its own
    lm = load_model(str(place / "model"), device="cpu")
    documents = [d.text for d in read_source((place / "text.txt",), 5.0).documents if d.held_out]
    for row, loss in zip(text_rows(lm, documents, 3, 24), told["results"]["conditions"][0]["rows"], strict=True):
        with torch.no_grad():
            logits = lm.model(input_ids=row[None, :-1]).logits[0]
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, row[1:])), abs=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placebo": 24}, "must be one of the 24 tokens"),
        ({"length": 4}, "--length"),
        ({"length": 2000, "placebo": 8}, "reads 256 tokens at most"),
        ({"rows": 10_000}, "pieces of 24 tokens where 10000 are needed"),
        ({"model": "/nowhere"}, "no model folder"),
    ],
)
def test_mistakes_are_one_sentence(place: Path, given, said):
    with pytest.raises(UserError, match=said):
        sign(**_options(place, **given))
