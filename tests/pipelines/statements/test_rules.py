"""Rules of statements: whole words, a fix each, and those of privacy are marked."""

import re
from pathlib import Path

from dpstream.pipelines.statements.rules import RULES

PIPELINES = Path(__file__).parents[3] / "pipelines"
FOLDERS = ("statements", "sql", "tables")


def test_each_rule_says_what_is_wrong_and_what_to_write() -> None:
    for code, rule in RULES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert rule.text and rule.fix and rule.text != rule.fix
        assert rule.text[0].islower() and not rule.text.endswith(".")
    assert RULES["join-without-unit"].privacy and not RULES["syntax"].privacy


def test_each_rule_is_asked_somewhere() -> None:
    paths = [path for folder in FOLDERS for path in (PIPELINES / folder).glob("*.py")]
    sources = "".join(path.read_text() for path in paths if path.name != "rules.py")
    assert [code for code in RULES if f'"{code}"' not in sources] == []
