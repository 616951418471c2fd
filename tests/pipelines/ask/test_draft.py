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
    of_run,
    write_file,
)
from dpstream.pipelines.formats.receipt import encoded


def manifest(**changed: object) -> Manifest:
    made = Manifest(
        run_id="5a" * 16, plan_hash="hash", program="p", request="1b" * 16, epsilon=1.0,
        delta=1e-10, mu=None, rho=0.5, insecure=False, files={},
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def test_what_an_output_shows_of_a_request_is_of_its_run_alone(tmp_path: Path) -> None:
    suffixes = {of_run(request, run) for request in ("1b" * 16, "2d" * 16) for run in ("a", "b")}
    assert len(suffixes) == 4 and not suffixes & {"1b" * 16, "2d" * 16}
    mine = manifest(request=of_run("1b" * 16, "5a" * 16))
    assert mine.answers("1b" * 16) and not mine.answers("2d" * 16)
    assert not manifest(request="1b" * 16).answers("1b" * 16)


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
