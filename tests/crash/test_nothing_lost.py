"""Whatever fails after the work, the result is there: runs broken at each late step, as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dualview
from dualview.analyses import compile
from dualview.cli import main as cli
from dualview.comparison.result import Result
from dualview.duality.on_model.shared_patch import read_metadata
from dualview.io import saving, terminal, versions
from dualview.io.errors import UserError
from dualview.lab.harness import LabResult, Unit, finish
from dualview.report import write_outputs as output
from dualview.store import cell as cell_module
from dualview.store.store import Store
from dualview.sweep.runner import sweep
from dualview.sweep.trackers import TRACKERS
from equivalence import tiny
from sweep.study import grid, save_study

SOURCE = Path(dualview.__file__).parents[1]
SMALL = ("--shots", "3", "--n-queries", "4", "--lr", "0.01", "--controls", "none", "--device", "cpu")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options of a run that takes a second."""
    model = tiny.save_model(tmp_path_factory.mktemp("model"))
    return ("--model", str(model), "--task", str(tiny.save_task(tmp_path_factory.mktemp("task"))), *SMALL)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return grid(save_study(tmp_path_factory.mktemp("study")), n_queries=4)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `dualview …`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["dualview", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def broken(*_: object, **__: object) -> Any:
    raise OSError(28, "No space left on device")


def must_be_a_result(path: Path) -> None:
    assert Result.load(path).accuracy.zsl >= 0


# ------------------------------------------------------------------------------------------------- package metadata


@pytest.fixture(scope="module")
def uninstalled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with every library, where dualview is a folder on PYTHONPATH and is not installed."""
    libraries = tmp_path_factory.mktemp("libraries")
    for place in {Path(entry) for entry in sys.path if entry.endswith("site-packages")}:
        for entry in place.iterdir():
            if "dualview" not in entry.name:
                (libraries / entry.name).symlink_to(entry)
    return {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{libraries}", "OMP_NUM_THREADS": "1"}


def test_without_package_metadata(asked: tuple[str, ...], uninstalled: dict[str, str], tmp_path: Path) -> None:
    # -S: the interpreter's own site-packages, where dualview may be installed, are not read.
    python = [sys.executable, "-S"]
    metadata = "import importlib.metadata as m; m.version('torch'); m.version('dualview')"
    found = subprocess.run([*python, "-c", metadata], env=uninstalled, capture_output=True, text=True, check=False)
    assert "PackageNotFoundError: No package metadata was found for dualview" in found.stderr
    command = [*python, "-m", "dualview", "run", *asked, "--out", str(tmp_path / "out")]
    run = subprocess.run(command, env=uninstalled, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    must_be_a_result(tmp_path / "out" / "result.json")
    result = Result.load(tmp_path / "out" / "result.json")
    assert result.provenance.versions["dualview"] == dualview.__version__
    assert result.provenance.versions["torch"][0].isdigit()


def test_a_sweep_and_a_lab_without_package_metadata(
    study: dict[str, Any], uninstalled: dict[str, str], tmp_path: Path
) -> None:
    script = (
        "import sys, json\n"
        "from dualview.sweep.runner import sweep\n"
        "from dualview.lab.regression.run import regression\n"
        "summary = sweep(json.loads(sys.argv[1]), 'store')\n"
        "assert summary.computed == 1, summary\n"
        "regression(out='lab', steps=2, seeds=1)\n"
    )
    command = [sys.executable, "-S", "-c", script, json.dumps(study)]
    run = subprocess.run(command, env=uninstalled, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    with Store(tmp_path / "store") as store:
        [stored] = store.results()
    assert stored.result.provenance.versions["dualview"] == dualview.__version__
    assert LabResult.load(tmp_path / "lab" / "regression.json").provenance["versions"]["dualview"]


def test_a_library_without_metadata_or_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    import numpy as np

    assert versions.version_of("numpy") == np.__version__  # what the module says of itself
    assert versions.version_of("no_such_package") == versions.UNKNOWN
    assert versions.versions()["dualview"] == dualview.__version__


def test_an_unknown_library_is_refused_before_a_sweep(
    study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualview.store import cell_key as identity

    monkeypatch.setattr(identity, "version_of", lambda _name: versions.UNKNOWN)
    identity.code_version.cache_clear()
    try:
        with pytest.raises(UserError, match="version of torch is not known"):
            sweep(study, tmp_path / "store")
    finally:
        identity.code_version.cache_clear()


def test_provenance_fails_before_the_work(asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from dualview.comparison import run as comparison

    worked: list[object] = []
    monkeypatch.setattr(comparison, "provenance", broken)
    monkeypatch.setattr(comparison, "ask", lambda *given: worked.append(given))
    with pytest.raises(OSError, match="No space"):
        call(monkeypatch, "run", *asked)
    assert worked == []


def test_a_patch_that_cannot_be_read_fails_before_the_work(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dualview.comparison import run as comparison

    worked: list[object] = []
    monkeypatch.setattr(comparison, "ask", lambda *given: worked.append(given))
    assert call(monkeypatch, "run", *asked, "--patch", tmp_path / "no.safetensors") == 2
    assert "there is no" in capsys.readouterr().err and worked == []


# --------------------------------------------------------------------------------------------------- a run's extras


def folder_in_place_of(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def spoil(out: Path, _patch: pytest.MonkeyPatch) -> None:
        (out / name / "full").mkdir(parents=True)

    return spoil


def spoilt(module: Any, name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def spoil(_out: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(module, name, broken)

    return spoil


EXTRAS = {
    "report.html is a folder": ("report.html", folder_in_place_of("report.html")),
    "the report cannot be made": ("report.html", spoilt(output, "write_report")),
    "records.safetensors is a folder": ("records.safetensors", folder_in_place_of("records.safetensors")),
    "the records do not fit the disk": ("records.safetensors", spoilt(output, "save_records")),
}


@pytest.mark.parametrize("case", EXTRAS)
def test_an_extra_that_fails_is_a_warning(
    case: str,
    asked: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, spoil = EXTRAS[case]
    out = tmp_path / "out"
    spoil(out, monkeypatch)
    assert call(monkeypatch, "run", *asked, "--out", out, "--save-records") == 0
    must_be_a_result(out / "result.json")
    said = capsys.readouterr()
    warned = [line for line in said.err.splitlines() if line.startswith("dualview: warning: ")]
    assert len(warned) == 1 and str(out / name) in warned[0] and str(out / "result.json") in warned[0]
    assert "wrote" in said.out and f"wrote {out / name}" not in said.out
    other = {"report.html": "records.safetensors", "records.safetensors": "report.html"}[name]
    assert (out / other).is_file()  # one extra's failure does not cost the next


def test_a_library_call_warns(asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "write_report", broken)
    given = {name[2:].replace("-", "_"): value for name, value in zip(asked[::2], asked[1::2], strict=True)}
    with pytest.warns(saving.ExtraFailed, match="report.html failed"):
        result = dualview.compare(**given, out=tmp_path / "out")
    assert Result.load(tmp_path / "out" / "result.json").to_json() == result.to_json()


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it is an ImportError from here on."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_matplotlib(monkeypatch)
    assert call(monkeypatch, "run", *asked, "--out", tmp_path / "out") == 0
    must_be_a_result(tmp_path / "out" / "result.json")
    assert (tmp_path / "out" / "report.html").is_file()  # its charts are drawn by the page
    command = ("report", tmp_path / "out", "--figures", tmp_path / "figures")
    assert call(monkeypatch, *command) == 2
    assert "Figures need matplotlib" in capsys.readouterr().err


def test_a_json_file_that_becomes_unwritable_beside_a_folder(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, save = tmp_path / "r.json", tmp_path / "out", Result.save

    def save_but(self: Result, path: Path) -> None:
        if path == file:
            file.mkdir()
        save(self, path)

    monkeypatch.setattr(Result, "save", save_but)
    assert call(monkeypatch, "run", *asked, "--out", out, "--json", file) == 0
    must_be_a_result(out / "result.json")
    assert f"{file} was not written (Is a directory); the result is in {out / 'result.json'}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--out"])
def test_a_result_that_cannot_be_written_is_kept_elsewhere(
    option: str,
    asked: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    place = tmp_path / "away" / "r.json" if option == "--json" else tmp_path / "away" / "result.json"
    save = Result.save

    def save_but(self: Result, path: Path) -> None:
        if path == place:  # the folder was there when the run began
            (tmp_path / "away").write_text("a file now")
        save(self, path)

    monkeypatch.setattr(Result, "save", save_but)
    assert call(monkeypatch, "run", *asked, option, place if option == "--json" else place.parent) == 2
    [kept] = (tmp_path / "temporary").glob("dualview-*/*.json")
    must_be_a_result(kept)
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{place} cannot be written (" in said and f"is kept in {kept}, move it from there." in said


# ------------------------------------------------------------------------------------------------------ several seeds


def test_finished_seeds_survive_a_seed_that_fails(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualview.comparison import run as comparison

    run = comparison.run

    def run_two(options: Any, **given: Any) -> Result:
        if options.seed == 3:
            raise RuntimeError("the machine is on fire")
        return run(options, **given)

    monkeypatch.setattr(comparison, "run", run_two)
    with pytest.raises(RuntimeError, match="on fire"):
        call(monkeypatch, "run", *asked, "--seeds", "1:3", "--out", tmp_path, "--save-records")
    for seed in (1, 2):
        must_be_a_result(tmp_path / f"seed-{seed}" / "result.json")
        assert (tmp_path / f"seed-{seed}" / "records.safetensors").is_file()


def test_finished_seeds_survive_an_interrupt_where_no_folder_was_given(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dualview.comparison import run as comparison

    run = comparison.run

    def run_two(options: Any, **given: Any) -> Result:
        if options.seed == 3:
            raise KeyboardInterrupt
        return run(options, **given)

    monkeypatch.setattr(comparison, "run", run_two)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert call(monkeypatch, "run", *asked, "--seeds", "1:3", "--json", tmp_path / "seeds.json") == 130
    said = capsys.readouterr().err
    for seed in (1, 2):
        [kept] = (tmp_path / "temporary").glob(f"dualview-*/seed-{seed}.json")
        must_be_a_result(kept)
        assert f"seed {seed} was finished; what was computed is kept in {kept}" in said


def test_seeds_without_a_report(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "report", broken)
    assert call(monkeypatch, "run", *asked, "--seeds", "1:2", "--out", tmp_path) == 0
    assert json.loads((tmp_path / "seeds.json").read_text())["seeds"] == [1, 2]
    assert f"Writing {tmp_path / 'report.html'} failed (No space left on device)" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- standard output


def run_to(stream: str, asked: tuple[str, ...], *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`dualview run …` with its standard output redirected by a shell."""
    command = f'"$0" -m dualview run "$@" {stream}'
    there = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *asked, *more], env=there, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("stream", [">&-", ">/dev/full"])
def test_a_table_that_cannot_be_printed_beside_a_folder(stream: str, asked: tuple[str, ...], tmp_path: Path) -> None:
    run = run_to(stream, asked, "--out", str(tmp_path / "out"))
    assert run.returncode == 0, run.stderr
    must_be_a_result(tmp_path / "out" / "result.json")
    assert f"the result is in {tmp_path / 'out' / 'result.json'}." in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("json", [(), ("--json", "-")])
@pytest.mark.parametrize(
    ("stream", "why"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device"), ("| :", "")]
)
def test_standard_output_cannot_be_written_and_is_the_only_place(
    stream: str, why: str, json: tuple[str, ...], asked: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_to(stream, asked, *json, TMPDIR=str(tmp_path))
    assert run.returncode == (2 if why else 0) and "Traceback" not in run.stderr  # of a pipe, that of the reader
    [kept] = tmp_path.glob("dualview-*/result.json")
    must_be_a_result(kept)
    last = run.stderr.splitlines()[-1]
    assert (
        f"{'result' if json else 'table'} could not be printed ({why or 'Broken pipe'})" in last and str(kept) in last
    )
    assert "warning" not in "".join(run.stderr.splitlines()[:-1])


def test_json_for_a_full_standard_output_beside_a_folder(asked: tuple[str, ...], tmp_path: Path) -> None:
    run = run_to(">/dev/full", asked, "--json", "-", "--out", str(tmp_path / "out"))
    assert run.returncode == 2
    assert f"the result is in {tmp_path / 'out' / 'result.json'}." in run.stderr.splitlines()[-1]


def test_a_terminal_that_knows_only_ascii(asked: tuple[str, ...], tmp_path: Path) -> None:
    more = ("--controls", "quick", "--out", str(tmp_path / "out"))
    run = run_to("", asked, *more, PYTHONIOENCODING="ascii:strict")
    assert run.returncode == 0, run.stderr
    assert "SimAOU raw" in run.stdout and "warning" not in run.stderr
    must_be_a_result(tmp_path / "out" / "result.json")


# ------------------------------------------------------------------------------------------------------------ sweeps


def test_a_cell_whose_records_cannot_be_written_is_stored(
    study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(cell_module, "save_records", broken)
        summary = sweep(grid(study, save_records=True), tmp_path / "store", say=said.append)
    assert (summary.computed, summary.failed) == (1, ())
    assert any("records could not be written (No space left on device); the result is stored" in line for line in said)
    with Store(tmp_path / "store") as store:
        [stored] = store.results()
        assert stored.result.accuracy.zsl >= 0 and store.records(stored.key) is None
    with monkeypatch.context() as patched:  # the records are all that is missing now, so it fails
        patched.setattr(cell_module, "save_records", broken)
        failing = sweep(grid(study, save_records=True), tmp_path / "store")
        assert failing.computed == 0 and "No space left on device" in failing.failed[0].reason
    again = sweep(grid(study, save_records=True), tmp_path / "store")  # for the records that are missing
    assert (again.computed, again.failed) == (1, ())
    with Store(tmp_path / "store") as store:
        assert store.records(stored.key) is not None


@pytest.mark.parametrize("end", [RuntimeError("no network"), SystemExit(1)])
@pytest.mark.parametrize("step", ["init", "log", "finish"])
def test_a_tracker_that_raises(
    end: BaseException, step: str, study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        """Stands for trackio."""

        def __getattr__(self, name: str) -> Any:
            def answer(*_: object, **__: object) -> None:
                if name == step:
                    raise end

            return answer

    monkeypatch.setitem(sys.modules, "trackio", Library())  # pyright: ignore[reportArgumentType]
    said: list[str] = []
    summary = sweep(grid(study, seed=[1, 2]), tmp_path / "store", track=["trackio"], say=said.append)
    assert (summary.computed, summary.failed) == (2, ())
    assert sum("trackio failed" in line for line in said) == 1
    with Store(tmp_path / "store") as store:
        assert len(list(store.results())) == 2


def test_a_tracker_that_cannot_be_imported_is_refused_first(
    study: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outdated.py").write_text("raise AttributeError('numpy has no attribute float_')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(TRACKERS["wandb"], "module", "outdated")
    with pytest.raises(UserError, match=r"--track wandb cannot be used \(numpy has no attribute float_\)"):
        sweep(study, tmp_path / "store", track=["wandb"])


# ------------------------------------------------------------------------------------------------------- other verbs


def a_lab_result() -> LabResult:
    return LabResult(lab="some", settings={}, seeds=[1], results={}, provenance={"command": "dualview lab some"})


def one_figure(_: LabResult) -> dict[str, Any]:
    from dualview.report.figures.curves import Curve, curves

    return {"fig": curves({"a": Curve([1, 2], [1.0, 2.0])}, "t", "x", "y", "n")}


@pytest.mark.parametrize("wrong", ["tables", "figures", "matplotlib"])
def test_a_lab_keeps_its_numbers(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(tmp_path, {"x": 1})
    unit.finish({"a": 1})
    if wrong == "matplotlib":
        without_matplotlib(monkeypatch)
    with pytest.warns(saving.ExtraFailed, match=r"the result is not affected, it is in .*some\.json"):
        result = finish(
            a_lab_result(),
            out=tmp_path,
            json=None,
            tables=broken if wrong == "tables" else lambda _: [],
            figures=broken if wrong == "figures" else one_figure,
            units=[unit],
        )
    assert LabResult.load(tmp_path / "some.json").to_json() == result.to_json()
    assert (tmp_path / "some.md").is_file() == (wrong != "tables")
    assert (tmp_path / "fig.png").is_file() == (wrong == "tables")
    assert not list(tmp_path.glob(".state-*"))


def test_a_verb_writes_its_json_before_its_table(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "show", broken)
    given = [word for word in asked if word not in ("--n-queries", "4", "--controls", "none")]
    with pytest.raises(OSError, match="No space"):
        call(monkeypatch, "explain", *given, "--query", "the film was fine", "--json", tmp_path / "e.json")
    assert json.loads((tmp_path / "e.json").read_text())["demos"]


def test_a_patch_that_cannot_be_written_is_kept_elsewhere(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path))
    save, out = compile.save_patch, tmp_path / "p.safetensors"

    def save_but(path: Path, *given: Any) -> Path:
        return broken() if path == out else save(path, *given)

    monkeypatch.setattr(compile, "save_patch", save_but)
    given = [word for word in asked if word not in ("--controls", "none")]
    assert call(monkeypatch, "compile", *given, "--out", out) == 2
    [kept] = tmp_path.glob("dualview-*/p.safetensors")
    assert read_metadata(kept)["shots"] == 3
    assert str(kept) in capsys.readouterr().err
