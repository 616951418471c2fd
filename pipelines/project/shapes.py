"""Texts of errors about fields of a project file that are missing or have another shape."""

import re

#: A line that may be copied, for each field whose shape is often another, or that is forgotten.
EXAMPLES = {
    "data_set.unit": 'unit = { name = "user", type = "string" }',
    "data_set.account": 'account = { id = "ID", path = "PATH" }, see `dpstream account show`',
    "data_set.secret": 'secret = "file:noise.secret"',
    "table.path": 'path = "visits/*.parquet"',
    "table.unit_column": 'unit_column = "COLUMN"',
    "table.time_column": 'time_column = "COLUMN"',
    "table.record_id": 'record_id = "COLUMN"',
    "table.unit_via": 'unit_via = { table = "TABLE", on = [["COLUMN", "KEY"]] }',
    "job.table": 'table = "visits"',
    "job.key": 'key = ["COLUMN"], or key = [{ column = "COLUMN", type = "int" }]',
    "job.aggregate": 'aggregate.records = { kind = "count" }',
    "job.aggregate.bounds": "bounds = [0, 100]",
    "job.start": 'start = "2024-01-01T00:00:00Z"',
    "job.end": 'end = "2025-01-01T00:00:00Z"',
    "job.window": 'window = "7 days"',
    "job.release_every": 'release_every = "7 days"',
    "job.budget": 'budget = { epsilon = 1.0, delta = 1e-8, covers = "window" }',
    "job.budget.epsilon": "epsilon = 1.0",
    "job.budget.delta": "delta = 1e-8",
    "job.budget.covers": 'covers = "window", "lifetime" or a length such as "28 days"',
    "job.contributions": "contributions = 10; `dpstream choose` then finds a better one",
    "job.sink": 'sink = { kind = "parquet", path = "releases" }',
    "job.sink.kind": 'kind = "parquet"',
}


def example(path: str) -> str | None:
    """Return an example line for the field at ``path``; ``None`` if there is none."""
    parts = re.sub(r"\[[^\]]*\]", "", path).split(".")
    field = ".".join((parts[0], *parts[2:]))
    named = ".".join((parts[0], *parts[2:3], *parts[4:]))  # without the name of an aggregate
    return EXAMPLES.get(field) or (EXAMPLES.get(named) if len(parts) > 4 else None)


def fix_of(path: str, rule: str) -> str:
    """Return what to write for a value that has another shape than its field.

    Args:
        path: the field, such as ``table.unit_column``.
        rule: the decoder's own text, such as ``Expected `object`, got `str```.
    """
    sample = example(path)
    if sample is not None:
        quotes = "it in quotes, " if "got `date" in rule else ""
        return f"write {quotes}{sample}"
    name = re.sub(r"\[.*", "", path.rpartition(".")[2])
    if "Expected `str" in rule or "got `datetime`" in rule or "got `date`" in rule:
        return f'write it in quotes, {name} = "..."'
    if "Expected `array" in rule:
        return f"write it in square brackets, {name} = [...]"
    if "Expected `object" in rule:
        return f"write a table, {name} = {{ ... }}, or [{path}] with its fields below"
    if "Expected `int" in rule and "got `str`" in rule:
        return f"write a whole number without quotes, {name} = 1"
    if "Expected `int" in rule:
        return f"write a whole number, {name} = 1"
    if "Expected `float" in rule:
        return f"write a number without quotes, {name} = 1.0"
    if "Expected `bool" in rule:
        return f"write {name} = true or {name} = false, without quotes"
    return "correct the value"
