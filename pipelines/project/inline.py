"""Inline tables of the project file that the program writes: ``{ name = value, other = value }``.

tomlkit adds a field to an inline table in the style of the text around it, for instance without a
space after the comma or before the brace.  An inline table that a command changes is written anew,
as `dpstream init` writes one; its values keep the form in which they were written.
"""

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import Array, InlineTable, SingleKey


def inline(value: Any) -> Any:
    """Return a value for a tomlkit document, with all tables in it as inline tables."""
    return tomlkit.parse(f"value = {_text(value)}\n")["value"]


def set_field(section: Any, table: str, field: str, value: Any) -> None:
    """Set a field of a table of a tomlkit section; an absent table becomes an inline one."""
    fields = section.get(table, {})
    if table in section and not isinstance(fields, InlineTable):
        fields[field] = value
    else:
        section[table] = inline({**fields, field: value})


def _text(value: Any) -> str:
    """Return a value as TOML; what was parsed from a file keeps the form that it has there."""
    if isinstance(value, Mapping):
        fields = (f"{SingleKey(name).as_string()} = {_text(part)}" for name, part in value.items())
        return f"{{ {', '.join(fields)} }}" if value else "{}"
    if isinstance(value, list) and not isinstance(value, Array):
        return f"[{', '.join(map(_text, value))}]"
    return str(tomlkit.item(value).as_string())
