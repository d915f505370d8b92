"""The notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
SHOWS = {
    "tour.ipynb": ("image/png", "text/html"),
    "own_model_and_task.ipynb": ("dualview-result", "SimAOU", "text/html"),
    "my_lora_against_icl.ipynb": (
        "dualview-result",
        "adapter in the place of fine-tuning",
        "learners.adapter.sim_aou.raw",
    ),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_outputs_are_stored(name: str) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell)


@pytest.mark.embedded
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(FOLDER.parents[1] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = str([output for cell in notebook.cells for output in cell.get("outputs", [])])
    assert all(text in outputs for text in SHOWS[name])
    assert len(outputs) < 1_000_000, "what a reader would commit stays below 1 MB"
