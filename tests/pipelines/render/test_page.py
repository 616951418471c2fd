"""Templates escape what they are given; a page replaces only an older one of its own.

The page's script: named by its digest, and data that cannot leave its element.
"""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.render.page import (
    begins_with,
    document,
    embedded,
    ending_of,
    mark_of,
    pages,
    policy,
    script_text,
    write_own,
)
from dpstream.state.durable import PRIVATE


def test_texts_are_escaped_and_names_must_be_there() -> None:
    template = pages().from_string("{{ a }}{{ b }} {{ n|human }}")
    assert template.render(a="<b>&", b=Markup("<i>"), n=12345) == "&lt;b&gt;&amp;<i> 12,345"
    with pytest.raises(UndefinedError):
        template.render(a="", b="")


def test_templates_include_each_other() -> None:
    style = pages().get_template("style.css.j2").render()
    assert "--ink" in style and "<" not in style
    assert pages().from_string('<style>{% include "style.css.j2" %}</style>').render() == (
        f"<style>{style}</style>"
    )


def test_the_policy_names_the_script_and_nothing_else() -> None:
    digest = base64.b64encode(hashlib.sha256(script_text().encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy(True).split("; "))
    assert rules["script-src"] == f"'sha256-{digest}'" and rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'" and "connect-src" not in rules
    assert policy(True, live=True) == policy(True) + "; connect-src 'self'"
    assert policy(images=True) == policy() + "; img-src data:" and "script-src" not in policy()
    page = document("waiting.html.j2", "report", script=True, live="7", text="<b>not yet")
    assert page.startswith(mark_of("report")) and f"<script>{script_text()}</script>" in page
    assert "&lt;b&gt;not yet" in page and "connect-src" in page
    assert "<script" not in document("waiting.html.j2", "report", text="")


def test_the_script_writes_text_alone() -> None:
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert sink not in script_text()
    assert "</script" not in script_text() and "<!--" not in script_text()


def test_data_holds_no_mark_of_html() -> None:
    evil = ["</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028\u2029", '"\\']
    text = embedded({"keys": evil})
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == {"keys": evil}


def test_only_files_of_its_own_are_replaced(tmp_path: Path) -> None:
    out, mark = tmp_path / "a.html", mark_of("report")
    for content in ("one", "two"):
        write_own(out, mark + content, mark)
    assert out.read_text() == mark + "two" and begins_with(out, mark)
    for other in (mark_of("session"), "<p>mine", ""):
        out.write_text(other)
        with pytest.raises(UsageError) as error:
            write_own(out, mark, mark)
        assert error.value.field == "--out" and out.read_text() == other
    with pytest.raises(RunError):
        write_own(tmp_path / "none" / "a.html", mark, mark)


def test_what_is_not_private_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_own(tmp_path / "a.html", mark_of("report"), mark_of("report"), PRIVATE)
    assert (tmp_path / "a.html").stat().st_mode & 0o777 == 0o600


def test_a_name_has_one_of_the_endings() -> None:
    assert ending_of(Path("a/x.PNG"), ("html", "png")) == "png"
    for name in ("a/x.svg", "a/x", "a/.png"):
        with pytest.raises(UsageError, match=r"must end in \.html or \.png") as error:
            ending_of(Path(name), ("html", "png"), "--picture")
        assert error.value.field == "--picture" and "type --picture " in error.value.fix
