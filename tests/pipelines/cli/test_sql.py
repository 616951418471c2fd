"""``dpstream sql`` as it is typed."""

import codecs
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from tests.pipelines.sql.asking import COUNTED, charges, data_set, dp
from tests.pipelines.tables.test_registration import people, shop_files

_TEXT = dp(f"page, {COUNTED} AS n") + " ORDER BY page"


def _run(project: Path, *words: object) -> Result:
    return CliRunner().invoke(cli, ["sql", "--project", str(project), *map(str, words)])


def test_an_answer_again_and_afresh(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    first = _run(path, _TEXT)
    assert first.exit_code == 0 and "Charged (2, 1e-09)" in first.stderr
    assert first.stdout.splitlines()[0].split() == ["page", "n"] and "±" in first.stdout
    again = _run(path, _TEXT)
    assert again.stdout == first.stdout and "first answered 20" in again.stderr
    assert "Charged (2" in _run(path, _TEXT, "--fresh").stderr
    as_json = json.loads(_run(path, _TEXT, "--json").stdout)
    assert as_json["charged"] is False and set(as_json["rows"][0]) == {"values", "intervals"}
    for option in ("--fresh", "--as-of"):
        assert option in again.stderr
    may = [_run(path, _TEXT, "--as-of", "May") for _ in range(2)]
    assert "Charged (2" in may[0].stderr and "first answered 20" in may[1].stderr
    assert may[0].stdout == may[1].stdout != first.stdout
    plan = json.loads(_run(path, _TEXT, "--explain", "--as-of", "May", "--json").stdout)
    assert plan["acceptance"]["charged"] is None
    plan = json.loads(_run(path, _TEXT, "--explain", "--as-of", "June", "--json").stdout)
    assert plan["acceptance"]["charged"]["epsilon"] == 2
    refused = _run(path, _TEXT, "--as-of", "a\nb")
    assert refused.exit_code == 2 and "Fix:" in refused.stderr
    assert len(charges(tmp_path)) == 3


class _Prompt:
    """A process with a terminal of its own, as somebody would type at it."""

    def __init__(self, project: Path, *words: str) -> None:
        self._terminal, inner = pty.openpty()
        command = [sys.executable, "-m", "dpstream", "sql", "--project", str(project), *words]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(inner)
        self.printed, self._decoder = "", codecs.getincrementaldecoder("utf-8")()

    def until(self, text: str, seconds: float = 60.0) -> str:
        """What is said up to a text, the text included."""
        end = time.monotonic() + seconds
        while text not in self.printed:
            left = end - time.monotonic()
            assert left > 0 and select.select([self._terminal], [], [], left)[0], self.printed
            self.printed += self._decoder.decode(os.read(self._terminal, 4096))
        before, _, self.printed = self.printed.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def test_the_prompt_goes_on_after_an_error(tmp_path: Path) -> None:
    prompt = _Prompt(data_set(tmp_path))
    try:
        assert "Ctrl-D ends" in prompt.until("sql> ")
        prompt.type(_TEXT[:40] + "\n")
        prompt.until("...> ")
        prompt.type(_TEXT[40:] + ";\n")
        assert "±" in prompt.until("Charged (2")
        prompt.until("sql> ")
        prompt.type("SELECT uid FROM visits;\n")
        assert "no-dp-select" in prompt.until("Fix:")
        prompt.until("sql> ")
        prompt.type(f"EXPLAIN {_TEXT};\n")
        assert "Threshold" in prompt.until("Together")
        prompt.until("sql> ")
        prompt.type(f"{_TEXT};\n")
        assert "first answered 20" in prompt.until("sql> ")
        assert prompt.process.poll() is None
        prompt.type("\x04")
        assert prompt.process.wait(20) == 0
    finally:
        prompt.close()
    assert len(charges(tmp_path)) == 1


@pytest.mark.parametrize("word", ["exit", "quit;", "\\q"])
def test_a_word_leaves_the_prompt(tmp_path: Path, word: str) -> None:
    prompt = _Prompt(data_set(tmp_path))
    try:
        prompt.until("sql> ")
        prompt.type(f"{word}\n")
        assert prompt.process.wait(20) == 0
    finally:
        prompt.close()


def test_the_prompt_of_explain_charges_nothing(tmp_path: Path) -> None:
    prompt = _Prompt(data_set(tmp_path), "--explain")
    try:
        prompt.until("sql> ")
        prompt.type(f"{_TEXT};\n")
        assert "Threshold" in prompt.until("Together")
    finally:
        prompt.close()
    assert charges(tmp_path) == []


def test_explain_files(tmp_path: Path) -> None:
    path, queries = data_set(tmp_path), tmp_path / "q.sql"
    text = f"{_TEXT};\nEXPLAIN {dp('COUNT(*) AS c', 'FROM visits')};"
    queries.write_text(text, encoding="utf-8-sig")  # as some editors save it
    explained = _run(path, "-f", queries, "--explain")
    assert explained.exit_code == 0 and "Statement 2" in explained.stdout
    assert "50% chance" in explained.stdout and "Together" in explained.stdout
    explanation = json.loads(_run(path, "-f", queries, "--explain", "--json").stdout)
    assert explanation["acceptance"]["accepted"] is True
    assert charges(tmp_path) == []
    both = _run(path, "-f", queries)
    assert "±" in both.stdout and "Together" in both.stdout and len(charges(tmp_path)) == 1


def test_a_mistake_in_a_script_is_told_before_its_first_charge(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    for wrong in ("DROP TABLE visits", "SELECT uid FROM visits", dp("COUNT(nothing) AS n")):
        refused = _run(path, f"{_TEXT}; {wrong}")
        assert refused.exit_code == 2 and "±" not in refused.stdout, wrong
    assert charges(tmp_path) == []
    empty = _run(path, " ;; ")
    assert empty.exit_code == 2 and "empty" in empty.stderr


def test_a_statement_of_stdin(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    command = ["sql", "--project", str(path), "-f", "-"]
    answered = CliRunner().invoke(cli, command, input=_TEXT)
    assert answered.exit_code == 0 and answered.stdout == _run(path, _TEXT).stdout
    for stream in ((), ("--stream", "live")):
        missing = CliRunner().invoke(cli, [*command[:-2], *stream], input=_TEXT)
        assert missing.exit_code == 2 and "statement: is missing" in missing.stderr
        typed = " ".join(("dpstream sql", *stream))
        assert f'`{typed} "SELECT ..."`' in missing.stderr and "-f -" in missing.stderr
    twice = CliRunner().invoke(cli, [*command, _TEXT], input=_TEXT)
    assert twice.exit_code == 2 and "leave out one" in twice.stderr
    closed = ["sh", "-c", '"$@" <&-', "sh", sys.executable, "-m", "dpstream", *command]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "closed" in done.stderr


def test_a_process_prints_the_answer_and_what_it_says_itself(tmp_path: Path) -> None:
    """DuckDB's binding reports objects that the interpreter does not collect at its end."""
    path = data_set(tmp_path)
    command = [sys.executable, "-m", "dpstream", "sql", "--project", str(path), _TEXT]
    expected = _run(path, _TEXT)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == expected.stdout
    assert done.stderr == _run(path, _TEXT).stderr


def test_a_runner_is_named_by_a_flag(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    outcome = _run(path, _TEXT, "--runner=DirectRunner", "--parallelism=2")
    assert outcome.exit_code == 0 and "Charged (2" in outcome.stderr
    assert _run(path, _TEXT).stdout == outcome.stdout  # the same answer, wherever it was drawn
    for words in (["--parallelism=2"], ["--beam-flag=--x=1"], ["--runner=No"],
                  ["--runner=DirectRunner", "--beam-flag=--x=1"],
                  ["--runner=DirectRunner", "--beam-flag=-x"]):  # fmt: skip
        refused = _run(path, _TEXT, "--fresh", *words)
        assert refused.exit_code == 2 and "Fix:" in refused.stderr
    assert len(charges(tmp_path)) == 1


def test_declared_keys_are_checked_by_a_command(tmp_path: Path) -> None:
    path = shop_files(tmp_path)
    query = dp(f"item, {COUNTED} AS n", "FROM orders GROUP BY item")
    refused = _run(path, query)
    assert refused.exit_code == 3 and "dpstream sql --check" in refused.stderr
    checked = _run(path, "--check")
    assert checked.exit_code == 0 and "rows of the unit of people (person = code)" in checked.stdout
    assert "Unique: people (code)" in checked.stdout
    assert json.loads(_run(path, "--check", "--json").stdout)["unique_keys"] == [
        ["people", ["code"]]
    ]
    first = _run(path, query)
    assert first.exit_code == 0
    people(tmp_path, "900,c5\n")
    assert _run(path, "--check").exit_code == _run(path, query, "--fresh").exit_code == 3
    assert _run(path, query).stdout == first.stdout  # an answer is given again as it was


def test_nothing_published_is_said(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    outcome = _run(path, _TEXT.replace("epsilon = 2", "epsilon = 0.001"))
    assert outcome.exit_code == 0 and "Nothing was published" in outcome.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["DROP TABLE visits"], 2), ([], 2), (["SELECT 1", "-f", "q.sql"], 2), ([""], 2),
        (["-f", "none.sql"], 2), ([_TEXT.replace("page,", "uid,").replace("BY page", "BY uid")], 3),
    ],
)  # fmt: skip
def test_refusals_have_codes_and_no_charge(words: list[str], code: int, tmp_path: Path) -> None:
    path = data_set(tmp_path)
    outcome = _run(path, *words)
    assert outcome.exit_code == code and "Fix:" in outcome.stderr and charges(tmp_path) == []
