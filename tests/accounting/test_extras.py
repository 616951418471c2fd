"""An extra's command fits the way the package was installed, and pip takes what it names."""

import json
import shlex

import pytest
from packaging.requirements import Requirement

from dpstream.accounting import extras


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "dpstream[kafka]"),
        ({"url": "file:///a%20b/c", "dir_info": {"editable": True}}, "-e|/a b/c[kafka]"),
        ({"url": "file:///clone", "dir_info": {}}, "/clone[kafka]"),
        (
            {"url": "file:///d/dpstream-0.1.0-py3-none-any.whl", "archive_info": {}},
            "dpstream[kafka] @ file:///d/dpstream-0.1.0-py3-none-any.whl",
        ),
    ],
)
def test_each_origin_has_its_command(origin: dict[str, object] | None, expected: str) -> None:
    command = extras._command(None if origin is None else json.dumps(origin), "kafka")
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"] and "|".join(words[2:]) == expected
    if origin is None or "archive_info" in origin:
        assert Requirement(words[-1]).extras == {"kafka"}


def test_this_installation_has_one() -> None:
    assert "[spanner]" in extras.installing("spanner")
