"""Flags first, then questions; an answer that will not do is asked for again."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.drafting.ask import Given, Person, answers
from dpstream.pipelines.drafting.draft import Answers
from tests.pipelines.drafting import SECRET, commits

NOTHING = Given(
    file="", unit=None, key=(), time=None, value=(), bounds=(), start=None, end=None, window=None,
    every=None, epsilon=None, delta=1e-8, contributions=10, micros=False, public_sample=False,
)  # fmt: skip
FLAGS = {
    "unit": "author", "key": ("path",), "time": "when", "start": "2023-01-01",
    "end": "2024-01-01", "epsilon": 2.0,
}  # fmt: skip


def answered(folder: Path, person: Person, **flags: Any) -> Answers:
    file = str(commits(folder / "a.parquet"))
    given = NOTHING._replace(file=file, **flags)
    return answers(given, person)


class Typist:
    """Types what it was given, in order, an empty line for the proposal."""

    def __init__(self, *typed: str) -> None:
        self.typed, self.messages = list(typed), list[str]()
        self.questions = list[tuple[str, str | None]]()

    def ask(self, question: str, proposal: str | None) -> str:
        self.questions.append((question.partition(":")[0].partition(" ")[0], proposal))
        return self.typed.pop(0) or proposal or ""


def test_a_person_is_asked_until_it_will_do(tmp_path: Path) -> None:
    who = Typist("nobody", "", "author", "path, sha", "epoch", "", "lines", "5 0", "0 5",
                 "2023", "2023-01-01", "2023-01-01", "2024-01-01", "", "x", "")  # fmt: skip
    replies = answered(tmp_path, Person(who.ask, who.messages.append))
    assert who.typed == [] and len(who.messages) == 1 + 7
    assert who.messages[0] == "Columns: sha, author, path, when, lines, epoch, nested"
    assert [f.column for f in replies.key] == ["path", "sha"] and replies.unit.type == "int"
    assert (replies.time, replies.values, replies.epsilon) == ("when", (("lines", 0, 5),), 1.0)
    assert replies.windows.length == "28d"
    assert ("Unit", "author") in who.questions and ("Time", "when") in who.questions


@pytest.mark.parametrize("flag", FLAGS)
def test_a_missing_flag_is_named(flag: str, tmp_path: Path) -> None:
    nobody = Person(None, lambda text: None)
    missing = NOTHING._asdict()[flag]
    with pytest.raises(UsageError, match="is required where nobody can be asked") as error:
        answered(tmp_path, nobody, **FLAGS | {flag: missing})
    assert error.value.field == f"--{flag}" and f"add --{flag} " in error.value.fix
    assert answered(tmp_path, nobody, **FLAGS).windows.length == "28d"


@pytest.mark.parametrize(
    ("flags", "field"),
    [({"value": ("lines",)}, "--bounds"), ({"bounds": ((0, 1),)}, "--bounds"),
     ({"key": ("author",)}, "--key"), ({"key": ("path", "path")}, "--key"),
     ({"end": "2023-01-01"}, "--end"), ({"time": "epoch"}, "--time"),
     ({"value": ("nested",), "bounds": ((0, 1),)}, "--value")],
)  # fmt: skip
def test_flags_that_will_not_do(flags: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        answered(tmp_path, Person(None, lambda text: None), **FLAGS | flags)
    assert error.value.field == field and SECRET not in str(error.value)


def test_a_public_sample_answers_start_end_and_bounds(tmp_path: Path) -> None:
    given = FLAGS | {"start": None, "end": None, "value": ("lines",), "public_sample": True}
    replies = answered(tmp_path, Person(None, lambda text: None), **given)
    assert replies.windows.start == "2023-03-05T00:00:00Z"
    assert replies.windows.end == "2023-09-22T00:00:00Z"
    assert replies.values == (("lines", 0, 200),)
