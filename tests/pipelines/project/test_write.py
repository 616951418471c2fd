"""Writing the project file: its rights and links stay, and what another program wrote too."""

import os
import stat
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.project.write import flush_project, write_project

OLD, NEW = "version = 1\n", "version = 1\n# more\n"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664, 0o666])
def test_the_mode_stays_whatever_the_umask(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "dpstream.toml"
    path.write_text(OLD)
    path.chmod(mode)
    mask = os.umask(0o077)
    try:
        write_project(path, NEW, OLD.encode())
    finally:
        os.umask(mask)
    assert path.read_text() == NEW and stat.S_IMODE(path.stat().st_mode) == mode
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "project" / "dpstream.toml"
    real.write_text(OLD)
    link.parent.mkdir()
    link.symlink_to(real)
    write_project(link, NEW, OLD.encode())
    assert link.is_symlink() and real.read_text() == NEW


def test_what_another_program_wrote_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "dpstream.toml"
    for before in (b"", b"version = 1\n# another\n"):
        path.write_text(OLD)
        with pytest.raises(PolicyError, match="another program"):
            write_project(path, NEW, before)
        assert path.read_text() == OLD
    path.unlink()
    write_project(path, NEW, b"")
    assert path.read_text() == NEW


def test_a_file_that_is_gone_cannot_be_flushed(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        flush_project(tmp_path / "dpstream.toml")
