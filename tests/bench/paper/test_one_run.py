"""A run in a process of its own: its last line is the result, or its refusal comes through."""

import json
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from tests.bench.paper.one_run import in_child, peak_gib


def child(folder: Path, lines: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"print({line!r})\n" for line in lines)
    (folder / "child_program.py").write_text(f"{text}raise SystemExit({code})\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_last_line_is_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, ["noise", '{"keys": 7}'], 0, monkeypatch)
    assert in_child("child_program") == {"keys": 7}


@pytest.mark.parametrize("kind", [UsageError, PolicyError, RunError])
def test_a_refusal_is_the_childs(
    kind: type[DpstreamError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_line = json.dumps(kind("sink.path", "rule", "fix").as_dict())
    child(tmp_path, [error_line], kind.exit_code, monkeypatch)
    with pytest.raises(kind) as error:
        in_child("child_program")
    assert (error.value.field, error.value.rule) == ("sink.path", "rule")


def test_an_end_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, ["SECRET"], 1, monkeypatch)
    with pytest.raises(RunError) as error:
        in_child("child_program")
    assert error.value.field == "run" and "SECRET" not in str(error.value)


def test_memory_never_shrinks() -> None:
    before = peak_gib()
    filled = bytearray(b"x" * (64 << 20))
    assert peak_gib() >= before > 0 and filled
