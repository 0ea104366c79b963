"""The notebook of the examples, run by a kernel as Jupyter runs it."""

import os

import nbformat
import pytest
from nbclient import NotebookClient
from support.docs.pages import ROOT


@pytest.mark.long
def test_every_cell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook needs nothing else started; the loss falls, and three ranks hold the same
    model."""
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    results = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]
    assert len(results) == 3
    assert "190 steps, loss from 2." in results[1] and " to 0." in results[1]
    assert "three ranks hold one model" in results[2]
