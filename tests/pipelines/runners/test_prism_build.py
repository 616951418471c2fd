"""Prism is built to listen on this machine only and to wait without a core, or not at all."""

from pathlib import Path

import pytest

from dpstream.pipelines.runners import prism_build as PRISM


def sources(folder: Path) -> Path:
    """Files that say what the edits of Prism replace."""
    for name, old, _ in PRISM.EDITS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "package x\n") + f"a({old})\n")
    return folder


def test_prisms_edits(tmp_path: Path) -> None:
    PRISM.edited(sources(tmp_path))
    go_source = "".join(path.read_text() for path in tmp_path.rglob("*.go"))
    assert all(new in go_source for _, _, new in PRISM.EDITS)
    assert go_source.count("127.0.0.1") == len(PRISM.EDITS) - 1
    assert '":%d"' not in go_source and "localhost" not in go_source
    assert go_source.count("dataReady = nil") == 1


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("edit", range(len(PRISM.EDITS)))
def test_another_source_is_not_built(edit: int, times: int, tmp_path: Path) -> None:
    name, old, _ = PRISM.EDITS[edit]
    path = sources(tmp_path) / name
    path.write_text(path.read_text().replace(old, " ".join([old] * times)))
    with pytest.raises(SystemExit, match=f"{times} times"):
        PRISM.edited(tmp_path)


def test_another_module_is_not_built(tmp_path: Path) -> None:
    assert PRISM.checked({"Sum": PRISM.SUM, "Dir": str(tmp_path)}) == tmp_path
    with pytest.raises(SystemExit, match="digest"):
        PRISM.checked({"Sum": "h1:other", "Dir": str(tmp_path)})
