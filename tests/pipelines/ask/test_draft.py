"""The manifest of an output, and the files of a draft."""

from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
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
from dpstream.pipelines.formats.receipt import encoded


def manifest(**changed: object) -> Manifest:
    made = Manifest(
        run_id="5a" * 16, plan_hash="hash", program="p", epsilon=1.0,
        delta=1e-10, mu=None, rho=0.5, insecure=False, files={},
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "t1").write_text("no folder")
    with pytest.raises(RunError, match=r"OUT: cannot be written: a file of that name"):
        write_file(tmp_path, File("t1/a.csv", b"one\n"))


def test_what_stands_is_an_output_or_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert existing_manifest(out) is None
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no output of this command"):
        existing_manifest(out)
    out.unlink()
    out.mkdir()
    (out / MANIFEST).write_text('{"program": "p", "more": 1}')
    with pytest.raises(PolicyError, match="another form"):
        existing_manifest(out)
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
    with pytest.raises(RunError, match="out_folder"):
        put((tmp_path / "c").as_uri(), file)
