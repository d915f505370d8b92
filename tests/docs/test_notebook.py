"""The notebooks run from top to bottom, and are committed without outputs.

Each runs in a kernel of its own, on the embedded model's first layers and with few shots and queries, as the pages do:
what its cells show is checked here, how the whole model fares in `test_samples.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from docs.small import save_cut_model

LAYERS = 6
"""As many as a notebook keeps that cuts the model itself."""
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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cut_model(tmp_path_factory.mktemp("model"), LAYERS)


@pytest.mark.embedded
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(FOLDER.parents[1] / folder) for folder in ("src", "tests")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    smaller = f"from pathlib import Path\nfrom docs.small import make_small\nmake_small(Path({str(model)!r}))"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(smaller))
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = str([output for cell in notebook.cells for output in cell.get("outputs", [])])
    assert all(text in outputs for text in SHOWS[name])
    assert len(outputs) < 1_000_000, "what a reader would commit stays below 1 MB"
