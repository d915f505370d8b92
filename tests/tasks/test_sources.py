"""The readers: the same rows whatever the file's kind, and a sentence for every file that cannot be read."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualview.io.errors import UserError
from dualview.tasks import sources
from dualview.tasks.hub import HubAddress, hub_addresses
from dualview.tasks.sources import read_file, read_source
from dualview.tasks.task import Task

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def as_task(kind: str) -> Task:
    return Task.model_validate(
        {"name": "t", "template": "{a}", "labels": ["x", "y"], "train": f"r.{kind}", "validation": f"r.{kind}"}
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXTS, st.integers(0, 1)), min_size=1, max_size=4))
def test_three_kinds_of_file_read_the_same(tmp_path: Path, rows: list[tuple[str, int]]) -> None:
    with (tmp_path / "r.csv").open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["a", "label"])
        writer.writerows(rows)
    (tmp_path / "r.jsonl").write_text(
        "".join(json.dumps({"a": a, "label": label}) + "\n" for a, label in rows), encoding="utf-8"
    )
    pq.write_table(pa.table({"a": [a for a, _ in rows], "label": [label for _, label in rows]}), tmp_path / "r.parquet")
    for kind in ("csv", "jsonl", "parquet"):
        read = as_task(kind).read(tmp_path / f"r.{kind}")
        assert [(row.fields["a"], row.label) for row in read] == rows, kind


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.jsonl", b"\n \n", r"a\.jsonl is empty"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl, line 1 is not a JSON object"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1 is not valid JSON"),
        ("a.jsonl", b'{"label": ' + b"1" * 5000 + b"}", r"a\.jsonl, line 1 is .* \(a number of too many digits\)"),
        ("a.jsonl", b'{"a": "\xe9"}\n', r"a\.jsonl is not UTF-8 text"),
        ("a.csv", b"", r"a\.csv is empty"),
        ("a.csv", b"a,label\n", r"a\.csv is empty"),
        ("a.csv", b"a,label\nx,1,2\n", r"a\.csv, line 2 has 3 cells for 2 columns"),
        ("a.csv", b"a,label\nx\n", r"a\.csv, line 2 has 1 cells for 2 columns"),
        ("a.csv", b"a,a\nx,1\n", r"a\.csv, line 1 names a column twice"),
        ("a.csv", b'a,label\n"x,1\n', r"a\.csv, line \d is not valid CSV"),
        ("a.csv", b"a\n" + b"x" * 200_000, r"a\.csv, line 2 is not valid CSV"),
        ("a.parquet", b"", r"a\.parquet is not a readable parquet file"),
        ("a.parquet", b"PAR1 nonsense PAR1", r"a\.parquet is not a readable parquet file"),
        ("a.txt", b"x", r"a\.txt is not a row file; its name must end in \.jsonl, \.csv or \.parquet"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_file(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_absent_files_and_folders(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=rf"a\.{kind} does not exist"):
        read_file(tmp_path / f"a.{kind}")
    (tmp_path / f"b.{kind}").mkdir()
    with pytest.raises(UserError, match=rf"b\.{kind} cannot be read"):
        read_file(tmp_path / f"b.{kind}")


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet is empty"):
        read_file(tmp_path / "a.parquet")


def test_a_byte_order_mark_is_not_part_of_the_first_field(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffa,label\nx,1\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('\ufeff{"a": "x", "label": 1}\n', encoding="utf-8")
    assert set(read_file(tmp_path / "a.csv")[0].values) == {"a", "label"}
    assert set(read_file(tmp_path / "a.jsonl")[0].values) == {"a", "label"}


def test_the_line_named_is_the_files_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,label\n"two\nlines",1\nx,7\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.csv, line 4: field 'label' is 7, out of range"):
        as_task("csv").read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("a,label\nx,one\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"b\.csv, line 2: field 'label' is 'one', not an integer"):
        as_task("csv").read(tmp_path / "b.csv")


def test_hub_addresses() -> None:
    assert hub_addresses("hf:imdb:test") == (HubAddress("imdb", None, "test"),)
    assert hub_addresses("hf:glue/sst2:train") == (
        HubAddress("glue/sst2", None, "train"),
        HubAddress("glue", "sst2", "train"),
    )
    for bad in ("hf:", "hf:glue", "hf:a/b/c/d:train", "hf:glue/sst2:", "hf::train", "hf:a b:train"):
        with pytest.raises(UserError, match="write hf:dataset/config:split"):
            hub_addresses(bad)


def test_hub_addresses_with_a_revision() -> None:
    """The revision ends the data set's name; those of the hub's own making have slashes."""
    assert hub_addresses("hf:glue@v1/sst2:train") == (HubAddress("glue", "sst2", "train", "v1"),)
    assert hub_addresses("hf:o/d@main:test") == (HubAddress("o/d", None, "test", "main"),)
    assert hub_addresses("hf:o/d@refs/pr/3/c:test") == (HubAddress("o/d", "c", "test", "refs/pr/3"),)
    for bad in ("hf:o/d@:train", "hf:@v1:train", "hf:o/d/c@v1:train", "hf:o/d@v1@v2:train", "hf:o/d@v1"):
        with pytest.raises(UserError, match="hf:dataset@revision/config:split"):
            hub_addresses(bad)


def test_hub_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """How they come from a hub is tested in tests/hub."""
    monkeypatch.setattr(sources, "read_hub", lambda source: ([{"a": "x"}] if "full" in source else [], "c0ffee"))
    commits: dict[str, str] = {}
    (row,) = read_source("hf:full/sst2:train", tmp_path, commits)
    assert (row.values, row.where) == ({"a": "x"}, "hf:full/sst2:train, row 1")
    assert commits == {"hf:full/sst2:train": "c0ffee"}
    with pytest.raises(UserError, match="hf:o/d:train has no rows"):
        read_source("hf:o/d:train", tmp_path)


def test_hub_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # what Python holds for a package that cannot be imported
    with pytest.raises(UserError, match=r"needs the datasets package \(.*\); run `pip install 'dualview\[hub\]'`"):
        read_source("hf:glue/sst2:train", tmp_path)


def test_embedded_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [SimpleNamespace(text="a", label=1)]
    monkeypatch.setattr(
        sources, "embedded_rows", lambda task, split: made if (task, split) == ("movie", "train") else []
    )
    assert read_source("embedded:movie:train", tmp_path)[0].values == {"text": "a", "label": 1}
    for bad in ("embedded:movie", "embedded:movie:test", "embedded:"):
        with pytest.raises(UserError, match="write embedded:NAME:train"):
            read_source(bad, tmp_path)
