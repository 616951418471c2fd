"""Readers of every kind of file, fed with mutated files: no crash, no lost row, no other row.

The longer run takes an hour, or ``FUZZ_SECONDS``; by hand: ``python -m tests.fuzz.run --help``.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.pipelines.formats import texts as text_files
from dpstream.pipelines.formats.lines import line_blocks
from tests.fuzz import run, settings, texts

#: Inputs of each target in ``make test``, 10 CPU seconds together.
INPUTS = {"csv": 150, "jsonl": 90, "packed": 30, "parquet": 600, "job": 500, "catalog": 400,
          "table": 400, "workload": 500, "sql": 200}  # fmt: skip


def fuzz(folder: Path, *options: str) -> None:
    """Run targets in a process of their own, which an input may kill; none may fail."""
    command = [sys.executable, "-m", "tests.fuzz.run", *options, "--out", str(folder)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    left = [path.name for path in folder.glob("*.current")]
    assert ran.returncode == 0 and not left, f"{ran.stdout}\n{ran.stderr[-2000:]}\n{left}"


def test_no_mutated_file_breaks_a_reader(tmp_path: Path) -> None:
    assert INPUTS.keys() == run.MODULES.keys()
    fuzz(tmp_path, "--seed", "1", "--inputs", *(f"{n}={INPUTS[n]}" for n in INPUTS))


@pytest.mark.slow
@pytest.mark.parametrize("target", run.MODULES)
def test_an_hour_of_mutated_files(target: str, tmp_path: Path) -> None:
    seconds = float(os.environ.get("FUZZ_SECONDS", "3600")) / len(run.MODULES)
    fuzz(tmp_path, target, "--seed", "2", "--seconds", str(seconds))


@pytest.mark.parametrize("target", ["job", "catalog", "table", "workload", "sql"])
def test_the_corpus_of_settings_is_accepted(target: str) -> None:
    check, corpus, _ = run.target_of(target)
    for data in corpus:
        check(data)
        settings.READERS[target](data)  # raises if it is refused


def test_a_refusal_is_the_same_before_a_comment() -> None:
    check, (job, *_), _ = run.target_of("job")
    check(b't="}')  # nothing can be appended to a text that is open
    check(job.replace(b"in.csv", b"k" * 300))  # no file system has it


def wrong(kind: str, data: bytes) -> str:
    """What is wrong with the rows of a file."""
    with pytest.raises(texts.WrongError) as error:
        texts.check(kind, data)
    return str(error.value).partition(":")[0]


def test_a_reader_that_takes_nul_for_text_is_seen(tmp_path: Path) -> None:
    none = mock.patch.object(text_files, "with_nul", lambda lines: np.zeros(len(lines), np.bool_))
    with none:
        failures = set(run.fuzz("csv", tmp_path, 1, 60, 60).failures)
    assert failures & {"WrongError another row", "uncoded ArrowInvalid"}


def test_a_reader_that_loses_rows_is_seen() -> None:
    real = line_blocks

    def cut(*args: Any, **how: Any) -> Iterator[tuple[int, Any]]:
        return ((row, lines[: len(lines) - 1]) for row, lines in real(*args, **how))

    with mock.patch.object(text_files, "line_blocks", cut):
        assert wrong("csv", b"user,page,n\n" + b"a,b,1\n" * 400) == "lost rows"
        assert wrong("csv", b"user,page,n\na,b,1\nc,d,2\n") == "other rows in other blocks"


def test_a_reader_whose_rows_depend_on_their_neighbours_is_seen() -> None:
    data = b'{"user": 1}\n{"user": [}\n{"user": 2}\n'
    texts.check("jsonl", data)
    with mock.patch.object(text_files, "_decode_one", lambda *_: None):
        assert wrong("jsonl", data) == "other rows in other blocks"


def test_definitions() -> None:
    """The readers that the program's are compared with, on rows whose meaning is certain."""
    assert texts.csv_fields(b'1,"a, ""b""",') == [b"1", b'a, "b"', None]
    assert texts.csv_fields(b'""') == [b""]
    assert [texts.csv_fields(line) for line in (b'"a', b'a"b', b'"a"b', b"a\rb", b"\0")] == [
        None
    ] * 5
    rows = texts.expected_jsonl(b'{"user": 1, "user": "b"}\n[]\n{"n": 1.5}\n{"n": [1]}\n{"n": NaN}')
    assert rows == [("b", None, None), "malformed", (None, None, 1.5), "malformed", "malformed"]
    halves = rb'{"x": {"y": [{"\ud800": 1}]}}', rb'{"x": ["\ud800"]}', rb'{"\ud800": 1, "n": 2}'
    open_ = [("either", "malformed", (None, None, n)) for n in (None, None, "2")]
    assert texts.expected_jsonl(b"\n".join(halves)) == open_
    assert texts.expected_jsonl(rb'{"page": "\ud800"}') == ["malformed"]
