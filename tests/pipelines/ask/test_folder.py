"""Folders of an answer's files, and the draft and manifest of a census execution."""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import RunError
from dpstream.pipelines.ask.draft import (
    MANIFEST,
    File,
    Manifest,
    decoded,
    existing_manifest,
    get,
    put,
    write_file,
)
from dpstream.pipelines.ask.folder import Archive, Output, Written, archive_of, is_written
from dpstream.pipelines.formats.receipt import encoded
from tests.golden.pinned import refusal
from tests.golden.refusals import Refused

NAMES = ["a.csv", "deep/er/b.csv"]
RECEIPT = b"receipt"


def archived(archive: Archive, receipt: bytes = RECEIPT) -> dict[str, Written]:
    """Two files, archived."""
    with archive.draft() as draft:
        assert stat.S_IMODE(os.stat(draft).st_mode) == 0o700
        (draft / "deep" / "er").mkdir(parents=True)
        for name in NAMES:
            (draft / name).write_text(name)
        (draft / "left.tmp").write_text("of a worker that was cut off")
        files = archive.seal(draft, NAMES)
        archive.keep(draft, receipt)
    return files


def published(archive: Archive, out: Path, files: dict[str, Written]) -> list[str]:
    def fill(into: Path, names: Iterable[str]) -> None:
        archive.take(RECEIPT, files, names, into)

    return Output(out, "manifest").publish(RECEIPT, files, fill)


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def hidden(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


def test_what_is_kept_is_private_and_published_whole(tmp_path: Path) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "deep" / "out"
    files = archived(archive)
    assert sorted(files) == sorted(NAMES)
    [place] = (tmp_path / "answers").iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE((place / name).stat().st_mode) for name in NAMES} == {0o600}
    assert published(archive, out, files) == []
    assert content(out) == {"manifest": RECEIPT} | {name: name.encode() for name in NAMES}
    assert stat.S_IMODE((out / NAMES[0]).stat().st_mode) & 0o444
    assert hidden(out.parent) == hidden(tmp_path) == hidden(tmp_path / "answers") == []
    assert published(archive, out, files) == []


def test_a_draft_that_cannot_be_written_is_a_coded_failure(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "answers")
    with pytest.raises(RunError, match="disk is full"), archive.draft():
        raise OSError(errno.ENOSPC, "of a library that writes")
    assert list((tmp_path / "answers").iterdir()) == []


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: str) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "out"
    files = archived(archive)
    published(archive, out, files)
    was, path = content(out), out / NAMES[1]
    path.write_text("x") if damage == "changed" else path.unlink()
    assert published(archive, out, files) == [NAMES[1]] and content(out) == was


def test_what_else_stands_there_is_not_touched(tmp_path: Path) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "out"
    files = archived(archive)
    out.mkdir()
    (out / "mine").write_text("mine")
    assert refusal(published, archive, out, files) == "UsageError OUT"
    assert refusal(Output(out, "manifest").check, None) == "UsageError OUT"
    (out / "manifest").write_bytes(b"another receipt")
    assert refusal(published, archive, out, files) == "UsageError OUT"
    assert (out / "mine").read_text() == "mine" and hidden(tmp_path) == []


def test_the_output_of_another_run_is_refused(tmp_path: Path) -> None:
    """Before the charge: an answer may only replace its own output."""
    mine, other = b"1" * 32, b"2" * 32
    output = Output(tmp_path, "manifest")
    (tmp_path / "manifest").write_bytes(b'{"run_id": "%s"}' % mine)
    output.check(mine.decode())
    for run_id in (other.decode(), "", None):
        assert refusal(output.check, run_id) == "UsageError OUT"


def test_a_place_where_no_folder_can_be_made_is_refused_before_the_charge(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        refusal(Output(tmp_path / "file" / "below" / "out", "manifest").check, None)
        == "RunError OUT"
    )
    Output(tmp_path / "below" / "out", "manifest").check(None)
    assert hidden(tmp_path) == [] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_an_archive_that_is_lost_is_refused(tmp_path: Path, damage: str, refused: Refused) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "out"
    files = archived(archive)
    [place] = (tmp_path / "answers").iterdir()
    if damage == "gone":
        (place / NAMES[0]).unlink()
    else:
        (place / NAMES[0]).write_text("other")
    caught = refused(published, archive, out, files)
    assert "--fresh" in caught.fix and not out.exists() and hidden(tmp_path) == []


def test_a_draft_that_is_not_kept_goes(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "answers")
    with archive.draft() as draft:
        (draft / NAMES[0]).write_text("x")
        assert refusal(archive.seal, draft, NAMES) == "RunError runner"
    assert list((tmp_path / "answers").iterdir()) == []
    archived(archive)
    files = archived(archive)  # the same receipt again, of somebody who was cut off
    assert len(list((tmp_path / "answers").iterdir())) == 1
    assert published(archive, tmp_path / "out", files) == []


def test_the_archive_lies_beside_the_account(tmp_path: Path) -> None:
    assert archive_of(tmp_path / "l.db", tmp_path / "x") == tmp_path / "l.db.answers"
    assert archive_of("spanner://p/i/d", tmp_path).parent == tmp_path
    assert not is_written(tmp_path / "none", Written(1, ""))


def manifest(**changed: object) -> Manifest:
    made = Manifest(
        run_id="5a" * 16, plan_hash="hash", program="p", epsilon=1.0,
        delta=1e-10, mu=None, rho=0.5, insecure=False, files={},
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "t1").write_text("no folder")
    assert refusal(write_file, tmp_path, File("t1/a.csv", b"one\n")) == "RunError OUT"


def test_what_stands_is_an_output_or_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert existing_manifest(out) is None
    out.symlink_to(tmp_path / "nowhere")
    assert refusal(existing_manifest, out) == "UsageError OUT"
    out.unlink()
    out.mkdir()
    (out / MANIFEST).write_text('{"program": "p", "more": 1}')
    assert refusal(existing_manifest, out) == "PolicyError manifest.json"
    assert decoded(encoded(manifest())) == manifest()


def test_objects_are_put_and_got(tmp_path: Path) -> None:
    file = File("t3/T03001/a.csv", b"one\n")
    put(str(tmp_path / "a"), file)
    put((tmp_path / "b").as_uri(), file)
    for folder in ("a", "b"):
        assert (tmp_path / folder / file.name).read_bytes() == b"one\n"
    assert get((tmp_path / "b").as_uri(), file.name) == b"one\n"
    assert get((tmp_path / "b").as_uri(), "t1/none.csv") is None
    (tmp_path / "c").write_text("no folder")
    assert refusal(put, (tmp_path / "c").as_uri(), file) == "RunError out_folder"
