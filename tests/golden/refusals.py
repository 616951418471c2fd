"""What calls are refused with, by the fixture ``refused``: class, field, rule and fix.

The texts of a test module stand in ``refusals/MODULE.txt`` beside it, below the name of their test;
``REWRITE=1`` writes those of the tests that run anew, and the diff tells what changed.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError

#: Calls what must be refused, with arguments if any, and returns the error.
Refused = Callable[..., DpstreamError]


@pytest.fixture
def refused(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Refused]:
    errors = list[DpstreamError]()

    def refuse(call: Callable[..., object], *given: object, **named: object) -> DpstreamError:
        with pytest.raises(DpstreamError) as error:
            call(*given, **named)
        errors.append(error.value)
        return error.value

    yield refuse
    if not errors:
        return
    alike = itertools.groupby(f"{type(error).__name__} {error}" for error in errors)
    counted = ((line, len(list(lines))) for line, lines in alike)
    text = "".join(f"{line} ({n} times)\n" if n > 1 else f"{line}\n" for line, n in counted)
    # Messages name a place relative to the working folder where that is shorter.
    base = tmp_path_factory.getbasetemp()
    bases = "|".join(re.escape(str(place)) for place in (base, os.path.relpath(base)))
    text = re.sub(rf"(?:{bases})/[^/ ]+", "FOLDER", text)
    text = text.replace(str(Path(__file__).parents[2]), "CHECKOUT")
    text = re.sub(r"(?<=test-instance/)[\w-]+", "DATABASE", text)
    text = re.sub(r"(?<=--topic )t\d+-\d+", "TOPIC", text)
    text = re.sub(r"\b[0-9a-f]{16}(?:[0-9a-f]{16})?\b", _drawn, text)
    path = request.path.parent / "refusals" / f"{request.path.stem}.txt"
    name, cases = request.node.nodeid.partition("::")[2], _cases(path)
    if os.environ.get("REWRITE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(f"== {n}\n{t}" for n, t in sorted({**cases, name: text}.items())))
    else:
        assert text == cases.get(name), f"differs from {path.name}; REWRITE=1 writes it anew"


def _drawn(digits: re.Match[str]) -> str:
    """A random id has many digits, a test's own one has few."""
    return "ID" if len({*digits[0]}) > 6 else digits[0]


def _cases(path: Path) -> dict[str, str]:
    """The texts of a file by test."""
    blocks = path.read_text().removeprefix("== ").split("\n== ") if path.exists() else []
    cases = (block.partition("\n") for block in blocks)
    return {name: f"{text.rstrip()}\n" for name, _, text in cases}
