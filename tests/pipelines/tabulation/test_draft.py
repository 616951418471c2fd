"""A draft is nobody else's, of one execution, and becomes the output whole."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.pipelines.tabulation.draft import (
    MANIFEST,
    Begun,
    File,
    Manifest,
    decoded,
    is_whole,
    locked,
    of_run,
    path_of,
    standing,
    write_file,
)

BEGUN = Begun("5a" * 16, "1b" * 16)
FILES = [File("t1/a.csv", b"one\n"), File("t3/T03001/b.csv", b"two\n")]
NAMES = [file.name for file in FILES]


def manifest(**changed: object) -> Manifest:
    found = Manifest("p", "5a" * 16, "hash", "1b" * 16, 1.0, 1e-10, None, 0.5, False, {})
    return Manifest(**{n: getattr(found, n) for n in found.__struct_fields__} | changed)


def test_a_draft_becomes_the_output_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with locked(out) as draft:
        assert stat.S_IMODE(os.stat(draft.path).st_mode) == 0o700
        assert draft.begun is None and draft.manifest is None
        draft.begin(BEGUN)
        assert draft.begun == BEGUN
        for file in FILES:
            write_file(draft.path, file)
        (draft.path / "t1" / ".left").write_text("of a worker that was cut off")
        written = draft.written(NAMES)
        assert {name: of.bytes for name, of in written.items()} == dict.fromkeys(NAMES, 4)
        assert not out.exists()
        draft.publish(manifest(files=written).encoded)
        draft.drop_if_empty()
    assert not path_of(out).exists()
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        *NAMES, MANIFEST,
    }  # fmt: skip
    assert standing(out) == manifest(files=written)


def test_beginning_anew_empties_it(tmp_path: Path) -> None:
    with locked(tmp_path / "out") as draft:
        draft.begin(BEGUN)
        write_file(draft.path, FILES[0])
        (draft.path / MANIFEST).write_bytes(manifest().encoded)
        assert draft.manifest == manifest()
        other = Begun("6c" * 16, "2d" * 16)
        draft.begin(other)
        assert draft.begun == other and draft.manifest is None
        assert [path.name for path in draft.path.iterdir()] == ["run.json"]
        with pytest.raises(RunError, match="has not handed over"):
            draft.written(NAMES)


def test_one_that_nothing_was_begun_in_is_dropped(tmp_path: Path) -> None:
    for begins in (False, True):
        with locked(tmp_path / "out") as draft:
            if begins:
                draft.begin(BEGUN)
            draft.drop_if_empty()
        assert path_of(tmp_path / "out").exists() == begins


def test_it_is_for_one_process_at_a_time(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from dpstream.pipelines.tabulation.draft import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('mine')\n"
    )

    def other() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "out")],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    with locked(tmp_path / "out"):
        refused = other()
        assert refused.returncode and "another process" in refused.stderr
    assert other().stdout == "mine\n"


def test_what_has_come_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out) as draft:
        draft.begin(BEGUN)
        out.mkdir()
        with pytest.raises(PolicyError, match="meanwhile"):
            draft.publish(manifest().encoded)
    assert list(out.iterdir()) == []


def test_what_stands_is_an_output_or_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert standing(out) is None
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PolicyError, match="no output of this command"):
        standing(out)
    out.unlink()
    out.mkdir()
    (out / MANIFEST).write_text('{"program": "p", "more": 1}')
    with pytest.raises(PolicyError, match="another form"):
        standing(out)
    assert decoded(manifest().encoded) == manifest()


def test_what_an_output_shows_of_a_request_is_of_its_run_alone(tmp_path: Path) -> None:
    shown = {of_run(request, run) for request in ("1b" * 16, "2d" * 16) for run in ("a", "b")}
    assert len(shown) == 4 and not shown & {"1b" * 16, "2d" * 16}
    mine = manifest(request=of_run("1b" * 16, "5a" * 16))
    assert mine.answers("1b" * 16) and not mine.answers("2d" * 16)
    assert not manifest(request="1b" * 16).answers("1b" * 16)


def test_a_file_that_is_not_the_manifest_s_is_noticed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out) as draft:
        draft.begin(BEGUN)
        for file in FILES:
            write_file(draft.path, file)
        found = manifest(files=draft.written(NAMES))
        draft.publish(found.encoded)
    assert is_whole(out, found)
    (out / NAMES[0]).write_bytes(b"two\n")
    assert not is_whole(out, found)
    (out / NAMES[0]).unlink()
    assert not is_whole(out, found)


def test_only_what_gets_its_place_is_opened_to_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out) as draft:
        draft.begin(BEGUN)
        out.mkdir()
        with pytest.raises(PolicyError, match="meanwhile"):
            draft.publish(manifest().encoded)
        assert stat.S_IMODE(os.stat(draft.path).st_mode) == 0o700
        assert draft.begun == BEGUN and draft.manifest is None
        os.chmod(draft.path, 0o755)  # cut off between this and its place
        draft.begin(BEGUN)
        assert stat.S_IMODE(os.stat(draft.path).st_mode) == 0o700


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "t1").write_text("no folder")
    with pytest.raises(RunError, match=r"OUT: cannot be written: a file of that name"):
        write_file(tmp_path, FILES[0])


def test_a_full_disk_is_told_when_the_run_is_named(tmp_path: Path) -> None:
    """Nothing is kept back for the lock's close, where it would fail without a way out."""
    program = (
        "import pathlib, resource, signal, sys\n"
        "from dpstream.accounting.errors import RunError\n"
        "from dpstream.pipelines.tabulation.draft import Begun, locked\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n"
        "    with locked(pathlib.Path(sys.argv[1])) as draft:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "        draft.begin(Begun('5a' * 16, '1b' * 16))\n"
        "except RunError as error: print(error.rule)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert said.stdout == "cannot be written: the file is too large\n", said.stderr
