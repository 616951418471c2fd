"""Programs of engines: where they are looked for, and what their own bytes say of them."""

from pathlib import Path

import pytest

from dpstream.pipelines.runners import parts, prism_build


def program(path: Path, text: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0binary\0" + text + b"\nmore")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (b"mod\tgithub.com/apache/beam/sdks/v2\tv2.70.0\th1:x", "2.70.0", True),
        (b"build\t-tags=loopback,beam2.71.0", "2.71.0", False),
        (b"build\t-tags=loopback,beam2.71.0,edits0123", "2.71.0", False),
        (b"mod\tgithub.com/apache/beam/sdks/v2\t(devel)", None, False),
        (b"nothing of the kind", None, False),
    ],
)
def test_a_prism_says_its_version(
    text: bytes, version: str | None, is_open: bool, tmp_path: Path
) -> None:
    made = program(tmp_path / "prism", text)
    assert parts.prism_version(made) == version
    assert parts.prism_is_open(made) is is_open


@pytest.mark.parametrize(
    ("tags", "has"),
    [(prism_build.TAGS, True), (prism_build.TAGS[:-1], False), ("loopback,beam2.77.0", False)],
)
def test_a_prism_says_its_edits(tags: str, has: bool, tmp_path: Path) -> None:
    made = program(tmp_path / "prism", f"build\t-tags={tags}".encode())
    assert parts.prism_has_edits(made) is has


def test_a_named_program_excludes_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "tools", lambda: [tmp_path])
    monkeypatch.setenv("PATH", "")
    assert parts.prism() is None and parts.job_server() is None and parts.kafka() is None
    made = program(tmp_path / "bin" / "prism", b"")
    jar = program(tmp_path / "flink" / "job-server.jar", b"")
    program(tmp_path / "kafka" / ".ready", b"")
    assert parts.prism() == made and parts.job_server() == jar
    assert parts.kafka() == tmp_path / "kafka"
    assert parts.prism(str(tmp_path / "none")) is None
    assert parts.job_server(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("version_output", "major"), [("17.0.2", 17), ("1.8.0_392", 8), ("next", None)]
)
def test_java_says_its_major_version(
    version_output: str, major: int | None, tmp_path: Path
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version_output}\"' >&2\n")
    java.chmod(0o700)
    assert parts.java_version(str(java)) == major
    assert parts.java_version(str(tmp_path / "none")) is None
