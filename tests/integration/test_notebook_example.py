"""The notebook of the examples runs, on a run recorded now, and was kept as it ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_look.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_something(
    recorded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(kept)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.outputs = []
    monkeypatch.setenv("FSDP2PROF_RUN", str(recorded("train_tiny_fsdp2", 2).run))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    before = [cell for cell in kept.cells if cell.cell_type == "code"]
    for cell, then in zip(cells, before, strict=True):
        shown = [set(output.get("data", {})) for output in cell.outputs]
        assert shown, cell.source
        assert shown == [set(output.get("data", {})) for output in then.outputs]
    figures = [one for cell in cells for one in cell.outputs if "plotly" in str(set(one.data))]
    assert len(figures) == 1
    assert NOTEBOOK.stat().st_size < 300_000
