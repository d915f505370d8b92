"""Records: every natural spelling is the same record, files round-trip, and bad input is one clear sentence."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dualview.io.errors import UserError
from dualview.records import Records, Setting, as_records, load_records, save_records

N, LAYERS, D, HEADS, COLUMNS = 5, 2, 4, 3, 6


def arrays(seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {
        name: {
            "log_probs": rng.normal(size=(N, 2)),
            "h": rng.normal(size=(N, LAYERS, D)).astype(np.float32),
            "m": rng.normal(size=(N, LAYERS, HEADS, COLUMNS)).astype(np.float32),
        }
        for name in ("zsl", "icl", "ft")
    }


GOLD = [0, 1, 1, 0, 1]


def same(a: Records, b: Records) -> None:
    assert a.gold.tolist() == b.gold.tolist()
    assert set(a.settings) == set(b.settings)
    assert (a.columns is None) == (b.columns is None)
    if a.columns is not None and b.columns is not None:
        assert a.columns.tolist() == b.columns.tolist()
    for name in a.settings:
        for what in ("log_probs", "h", "m", "demo_mass"):
            left, right = getattr(a[name], what), getattr(b[name], what)
            assert (left is None) == (right is None)
            if left is not None:
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)


def test_every_spelling_is_the_same_record() -> None:
    data = arrays()
    wanted = Records(np.array(GOLD), {name: Setting(**fields) for name, fields in data.items()})
    logs, h, m = ({name: fields[what] for name, fields in data.items()} for what in ("log_probs", "h", "m"))
    flat = {"gold": GOLD} | {f"{what}_{name}": a for name, f in data.items() for what, a in f.items()}
    dotted = {"gold": GOLD} | {f"{name}.{what}": a for name, f in data.items() for what, a in f.items()}
    suffixed = {"gold": GOLD} | {f"{name}_{what}": a for name, f in data.items() for what, a in f.items()}
    spellings = [
        {"gold": GOLD, **data},
        {"gold": GOLD, "settings": data},
        {"gold": np.array(GOLD), "log_probs": logs, "h": h, "m": m},
        {"gold": GOLD, **logs, "h": h, "m": m},
        {"gold": GOLD, "log_probs": logs, "h": list(h.values()), "m": tuple(m.values())},
        {"gold": GOLD, **{name: wanted[name] for name in data}},
        flat,
        dotted,
        suffixed,
    ]
    for spelling in spellings:
        same(as_records(spelling), wanted)
    same(Records.from_arrays(GOLD, logs["zsl"], logs["icl"], logs["ft"], h=h, m=list(m.values())), wanted)
    assert as_records(wanted) is wanted
    assert as_records(SimpleNamespace(records=wanted)) is wanted


def test_result_rows_and_ragged_choices() -> None:
    rows = [
        {"gold": 1, "zsl": [-1.0, -2.0, -3.0], "icl": [-2.0, -1.0, -3.0], "ft": [-2.0, -1.0, -3.0]},
        {"gold": 0, "zsl": [-1.0, -2.0], "icl": [-1.0, -2.0], "ft": [-1.0, -2.0]},
    ]
    records = as_records({"queries": rows})
    assert records["zsl"].log_probs[1].tolist() == [-1.0, -2.0, -np.inf]
    assert records.gold.tolist() == [1, 0]


def test_predictions_alone_become_scores() -> None:
    records = Records.from_arrays([0, 1, 2], [0, 0, 0], [0, 1, 1], [0, 1, 2])
    assert records["icl"].log_probs.shape == (3, 3)
    assert records["icl"].log_probs.argmax(axis=1).tolist() == [0, 1, 1]


def test_ragged_and_nan_padded_maps_give_columns() -> None:
    data, columns = arrays(), [6, 2, 3, 1, 4]
    base = {name: fields["m"].astype(np.float64) for name, fields in data.items()}
    logs = [fields["log_probs"] for fields in data.values()]
    ragged = {name: [m[i, ..., :c] for i, c in enumerate(columns)] for name, m in base.items()}
    inside = np.arange(COLUMNS) < np.array(columns)[:, None, None, None]
    padded = {name: np.where(inside, m, np.nan) for name, m in base.items()}
    zeroed = {name: np.where(inside, m, 0.0) for name, m in base.items()}
    wanted = Records.from_arrays(GOLD, *logs, m=zeroed, columns=columns)
    same(Records.from_arrays(GOLD, *logs, m=ragged), wanted)
    same(Records.from_arrays(GOLD, *logs, m=padded), wanted)


def test_file_round_trip_is_exact(tmp_path) -> None:
    data = arrays()
    control = {"log_probs": data["icl"]["log_probs"], "demo_mass": np.full((N, LAYERS, HEADS), 0.25, np.float16)}
    records = as_records(
        {"gold": GOLD, **data, "icl_reordered": control, "columns": [6] * N, "meta": {"seed": 3, "é": [1]}}
    )
    path = save_records(records, tmp_path / "deep" / "run.safetensors")
    again = load_records(path)
    same(again, records)
    assert again.meta == {"seed": 3, "é": [1]}
    assert list(again.settings) == ["zsl", "icl", "ft", "icl_reordered"]
    assert as_records(str(path)).gold.tolist() == GOLD
    first = path.read_bytes()
    save_records(again, path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["run.safetensors"]


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    records = as_records({"gold": GOLD, **arrays()})
    path = save_records(records, tmp_path / "r.safetensors")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(UserError, match=r"r\.safetensors.*No space left"):
        save_records(records, path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_unreadable_files(tmp_path) -> None:
    with pytest.raises(UserError, match="no such records file"):
        load_records(tmp_path / "absent")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\x00")
    with pytest.raises(UserError, match=r"broken\.safetensors: not a readable"):
        load_records(broken)
    from safetensors.numpy import save_file

    save_file({"gold": np.arange(3)}, broken)
    with pytest.raises(UserError, match="not a records file"):
        load_records(broken)
    whole = save_records(as_records({"gold": GOLD, **arrays()}), tmp_path / "whole.safetensors")
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a readable"):
        load_records(whole)
    with pytest.raises(UserError, match="meta cannot be written"):
        save_records(as_records({"gold": GOLD, **arrays(), "meta": {"x": object()}}), tmp_path / "x")


def broken(**changes: object) -> dict[str, object]:
    return {"gold": GOLD, **arrays(), **changes}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({k: v for k, v in broken().items() if k != "gold"}, "gold is missing"),
        ({k: v for k, v in broken().items() if k != "ft"}, "setting ft is missing"),
        (broken(gold=[0, 1, 2, 0, 1]), "label 2, but log_probs has 2 candidates"),
        (broken(gold=[0, 1, -1, 0, 1]), "label -1"),
        (broken(gold=[0.5, 1, 1, 0, 1]), "whole numbers"),
        (broken(gold=[]), "non-empty"),
        (broken(ft={"h": np.zeros((N, LAYERS, D))}), r"ft\.log_probs is missing"),
        (broken(ft={"log_probs": np.zeros((4, 2))}), r"ft\.log_probs has shape \(4, 2\)"),
        (broken(ft={"log_probs": np.zeros((N, 2)), "h": np.zeros((N, LAYERS, 9))}), r"ft\.h has shape"),
        (broken(ft={"log_probs": np.zeros((N, 2)), "h": np.zeros((N, LAYERS))}), r"ft\.h has shape"),
        (broken(ft={"log_probs": [[1.0], [1.0, 2.0]]}), "not a rectangular array"),
        (broken(ft={"log_probs": np.zeros((N, 2)), "heat": 1}), r"ft\.heat is no field"),
        (broken(columns=[7] * N), "columns holds 7, but m has only 6"),
        (broken(columns=[0] * N), "positive number"),
        (broken(h=np.zeros((N, LAYERS, D))), "h must name its settings"),
        (broken(settings=[1]), "settings must be a mapping"),
        ({"queries": [{"gold": 1, "zsl": [0.0, 1.0]}]}, "each row of queries"),
        (3.5, "cannot read a float"),
    ],
)
def test_bad_input_is_one_clear_sentence(source: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        as_records(source)
    assert "\n" not in str(caught.value)
