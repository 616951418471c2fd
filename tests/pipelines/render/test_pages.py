"""Templates: all texts escaped, what they include too, and nothing missing in silence."""

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from dpstream.pipelines.render.pages import pages


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
