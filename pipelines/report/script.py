"""The one script of a page and the data it shows: inside the page, and nothing else may run.

The script's digest stands in the page's Content-Security-Policy: a script that a key or a column
smuggled in would not run, nothing is loaded and nothing sent.  The data is JSON in which no mark
of HTML is left, and the script puts text into the page as text alone (Trusted Types, which the
policy requires, refuse anything else).
"""

import base64
import hashlib
from importlib import resources
from typing import Any

import msgspec
from markupsafe import Markup

#: Marks that could end a script element or begin one, and the escapes JSON has for them.
_MARKS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def script() -> str:
    """The script's text: search, sort, CSV, tooltips; of a served page, looking again."""
    folder = resources.files("dpstream.pipelines").joinpath("templates")
    return folder.joinpath("report.js").read_text("utf-8")


def policy(live: bool = False) -> str:
    """The page's Content-Security-Policy.

    Args:
        live: a served page asks its own server whether there is something new.
    """
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    rules = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(rules)


def embedded(value: Any) -> Markup:
    """JSON for a data element: no text of it can end the element."""
    text = msgspec.json.encode(value).decode()
    for mark, escape in _MARKS.items():
        text = text.replace(mark, escape)
    return Markup(text)


def parts(live: bool = False) -> dict[str, Any]:
    """What each template with the script is given."""
    return {"policy": policy(live), "script": Markup(script())}
