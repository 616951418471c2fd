"""Shapes of a job file: a column by its name alone, and what is said to a table of another shape.

``unit = "author"`` is short for ``unit = { column = "author" }``; so are ``key = "page"``, ``key =
["page", "lang"]``, ``event_time = "at"`` and ``record_id = "id"``.  The type is that of the long
form then: string.
"""

import re
from typing import Any

from dpstream.accounting.errors import UsageError

#: A line that may be copied, for each key whose shape is often another, or that is forgotten.
EXAMPLES = {
    "source": '[source] with kind = "parquet" and path = "FILE"',
    "source.kind": 'kind = "parquet"',
    "schema": '[schema] with unit = "COLUMN", key = ["COLUMN"] and event_time = "COLUMN"',
    "schema.unit": 'unit = "COLUMN", or unit = { column = "COLUMN", type = "int" }',
    "schema.key": 'key = ["COLUMN"], or key = [{ column = "COLUMN", type = "int" }]',
    "schema.event_time": 'event_time = "COLUMN"',
    "schema.record_id": 'record_id = "COLUMN"',
    "aggregate": '[[aggregate]] with name = "records" and kind = "count"',
    "aggregate[...].clamp": "clamp = [0, 100]",
    "time": '[time] with start = "2024-01-01T00:00:00Z", window = "1d" and trigger_every = "1d"',
    "time.start": 'start = "2024-01-01T00:00:00Z"',
    "time.end": 'end = "2025-01-01T00:00:00Z"',
    "time.window": 'window = "7d"',
    "time.trigger_every": 'trigger_every = "7d"',
    "privacy": "[privacy] with epsilon = 1.0, delta = 1e-8 and contributions = 10",
    "privacy.epsilon": "epsilon = 1.0",
    "privacy.delta": "delta = 1e-8",
    "privacy.contributions": "contributions = 10; `dpstream choose` then finds a better one",
    "sink": '[sink] with kind = "parquet" and path = "releases"',
    "sink.kind": 'kind = "parquet"',
    "ledger.id": "the line that `dpstream account create` or `dpstream account show` prints",
    "source.query": "[source.query] with text = 'SELECT ...'",
}


def with_columns(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with every column in its long form; ``tables`` itself is not changed.

    Raises:
        UsageError: ``aggregate`` is one table, of which there may be several.
    """
    if isinstance(tables.get("aggregate"), dict):
        raise UsageError(
            "aggregate",
            "is one table in single brackets, and there may be several",
            f"write {EXAMPLES['aggregate']}",
        )
    schema = tables.get("schema")
    if not isinstance(schema, dict):
        return tables
    long = {
        name: _column(schema[name])
        for name in ("unit", "event_time", "record_id")
        if name in schema
    }
    if "key" in schema:
        key = schema["key"]
        long["key"] = list(map(_column, key)) if isinstance(key, list) else _single(key)
    return tables | {"schema": schema | long}


def _column(written: Any) -> Any:
    return {"column": written} if isinstance(written, str) else written


def _single(key: Any) -> Any:
    """One key column that is in no list; anything else is refused where tables are decoded."""
    return [_column(key)] if isinstance(key, str | dict) else key


def example(path: str) -> str | None:
    """A line that may be copied, for the key at ``path``; ``None``: none is known."""
    return EXAMPLES.get(re.sub(r"\[\d+\]", "[...]", path)) or EXAMPLES.get(
        re.sub(r"\[(\d+|\.\.\.)\]$", "", path)
    )


def fix_of(path: str, rule: str) -> str:
    """What to write where a value has another shape than its key.

    Args:
        path: of the key, such as ``schema.unit``.
        rule: the decoder's own words, such as ``Expected `object`, got `str```.
    """
    shown = example(path)
    if shown is not None:
        quotes = "it in quotes, " if "got `date" in rule else ""
        return f"write {quotes}{shown}"
    name = re.sub(r"\[.*", "", path.rpartition(".")[2])
    if "Expected `str" in rule or "got `datetime`" in rule or "got `date`" in rule:
        return f'write it in quotes, {name} = "..."'
    if "Expected `array" in rule:
        return f"write it in square brackets, {name} = [...]"
    if "Expected `object" in rule:
        return f"write a table, [{path}], with its keys below"
    if "Expected `int" in rule and "got `str`" in rule:
        return f"write a whole number without quotes, {name} = 1"
    if "Expected `int" in rule:
        return f"write a whole number, {name} = 1"
    if "Expected `float" in rule:
        return f"write a number without quotes, {name} = 1.0"
    if "Expected `bool" in rule:
        return f"write {name} = true or {name} = false, without quotes"
    return "correct the value"
