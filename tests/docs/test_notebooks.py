"""The notebooks of the documentation run as they stand, in a kernel of their own, and still show
what they show.

``REWRITE=1 pytest tests/docs/test_notebooks.py`` writes the outputs anew.
"""

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
#: Of a figure, which noise changes.
_NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook with what its cells say in an empty folder."""
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # neither warnings of libraries, nor pages of theirs
            cell.outputs = [out for out in cell.outputs if _is_ours(out)]
    return notebook


def _is_ours(output: Any) -> bool:
    return output.get("name") == "stdout" or output.output_type == "execute_result"


def outputs_of(notebook: Any) -> list[list[tuple[str, set[str]]]]:
    """Of each cell's outputs their kind and their words, without figures."""
    cells = []
    for cell in notebook.cells:
        outputs = []
        for output in cell.get("outputs", ()):
            text = output.get("text") or output["data"]["text/plain"]
            outputs.append((output.output_type, set(_NUMBER.sub("", text).split())))
        cells.append(outputs)
    return cells


def merged(cells: list[list[tuple[str, set[str]]]]) -> list[dict[str, set[str]]]:
    """Words by kind: how a kernel cuts what is printed is its own affair."""
    return [{kind: set().union(*(w for k, w in cell if k == kind)) for kind, _ in cell}
            for cell in cells]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_it_shows(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    before = merged(outputs_of(notebook))
    after = executed(notebook, tmp_path)
    if os.environ.get("REWRITE"):
        nbformat.write(after, path)
        return
    assert merged(outputs_of(after)) == before
    assert not re.search(r"https?:|/tmp/|site-packages", path.read_text())


def test_there_are_notebooks_and_a_cell_that_fails_is_seen(tmp_path: Path) -> None:
    assert len(NOTEBOOKS) >= 2
    with pytest.raises(CellExecutionError):
        executed(new_notebook(cells=[new_code_cell("1 / 0")]), tmp_path)
