"""A statement as a stream job: what it asks becomes a job's key, aggregates, C and query.

The job file gives windows, triggers, source, sink, store, ledger and key; the statement the rest.
Nothing runs here: the result is the text of a complete job file, which any runner takes.

| statement | job |
| --- | --- |
| ``epsilon``, ``delta`` | ``budget.epsilon``, ``delta`` |
| ``max_rows_contributed`` | ``contributions``, C: rows of a unit that count |
| ``min_privacy_units_per_group = m`` | ``mechanism.pre_threshold = m - 1`` |
| GROUP BY | ``key`` |
| COUNT(*), SUM, COUNT(DISTINCT unit) | aggregates of kind ``count``, ``sum``, ``units`` |
| AVG | kind ``mean``, the engine's own: a noisy centred sum over the noisy count |
| FROM, WHERE, expressions, public look-ups | ``[source.query]`` (`row_local`), if there are any |

C rows count of a unit in all groups together.  Bounds are those of one row, in either spelling: a
stream clamps every row as it comes, and a unit adds at most C of them.  A row whose group or
argument is NULL is no record: it is a dead letter, where an answer from tables would count it in
COUNT(*).  What both the job file and the statement say must be the same.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomlkit
from sqlglot import exp
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable

from dpstream.accounting.budget import allocate
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.plan.fields import Aggregate, Field, job_field
from dpstream.accounting.strength import refuses
from dpstream.pipelines.jobs.committed import check_tuning
from dpstream.pipelines.jobs.job import Job, decode_job, job_of, read_text, source_path
from dpstream.pipelines.jobs.tables import LookUpConfig, QueryConfig, SourceConfig
from dpstream.pipelines.project.text import parse_toml, raise_decode_error
from dpstream.pipelines.sql.allowed import require
from dpstream.pipelines.sql.dialect import DpSql
from dpstream.pipelines.sql.functions import Function
from dpstream.pipelines.sql.ownership import type_of
from dpstream.pipelines.sql.row_local import check_row_local
from dpstream.pipelines.sql.row_query import Readable, readable
from dpstream.pipelines.sql.statement import Statement, statement_of
from dpstream.pipelines.sql.stream_form import (
    KEYS,
    KINDS,
    check_functions,
    checked_form,
    stream_options,
)

_NUMBERS = (exp.DType.BIGINT, exp.DType.DOUBLE, exp.DType.DECIMAL)
#: log2 of the steps that bounds are cut into; fewer where the noise would leave its range.
BITS = tuple(range(16, 3, -2))


class _Unit(msgspec.Struct):
    """``[schema]`` as far as a statement needs it."""

    unit: Field


class _Named(msgspec.Struct):
    """What a job file says before a statement completes it: what it can name."""

    source: SourceConfig
    schema: _Unit


class StreamJob(NamedTuple):
    """A job that a statement asks for: checked, and the text of its file."""

    job: Job
    text: str


def stream_job(path: Path, statement: str) -> StreamJob:
    """The job of a statement; no row is read.

    Args:
        path: of the job file that lacks what the statement says.
        statement: one differentially private SELECT.

    Raises:
        DpstreamError: the file or the statement is not usable, or not private as a stream.
    """
    path = path.absolute()
    given = read_text(path)
    job_tables = _readable(parse_toml(given), path.parent)
    checked_form(statement)
    parsed = statement_of(statement, job_tables.tables, stream_options)
    require(parsed.functions, "no-function")
    check_row_local(_whole(parsed, []), job_tables.tables)
    check_functions(parsed, statement)
    fits: UsageError | None = None
    for bits in BITS:
        text = _filled(given, parsed, job_tables, bits)
        job = job_of(decode_job(text.encode()), path)
        check_tuning(job)
        try:
            allocate(job.plan)
        except UsageError as error:  # noise beyond its range: a coarser grid may have it inside
            fits = error
            continue
        return StreamJob(job, text)
    raise required(fits, "fits is there")


def _readable(tables: dict[str, Any], folder: Path) -> Readable:
    """What statements on a job file can name."""
    try:
        named = msgspec.convert(tables, _Named)
    except msgspec.ValidationError as error:
        raise_decode_error(error, _Named)
    source = named.source
    if source.query is not None and source.query.text is not None:
        raise UsageError(
            "query", "is what the statement says", "remove it, or run the job as it is"
        )
    resolved = msgspec.structs.replace(source, path=source_path(folder, source))
    return readable(resolved, named.schema.unit, folder)


def _whole(parsed: Statement, items: list[exp.Expr]) -> exp.Select:
    """The private relation with a select list."""
    query = parsed.source.copy()
    query.set("expressions", items)
    return query


def _filled(given: bytes, parsed: Statement, job_tables: Readable, bits: int) -> str:
    """The job file's text with what the statement says; everything else as it was written."""
    try:
        document: Any = tomlkit.parse(given.decode("utf-8"))
    except (TOMLKitError, UnicodeDecodeError):
        raise UsageError("job file", "cannot be rewritten", "simplify its layout") from None
    columns, query = _columns(parsed, job_tables)
    document["source"].pop("query", None)
    if query is not None:
        inline = isinstance(document["source"], InlineTable)
        document["source"]["query"] = _plain(query) if inline else _query_table(query)
    for name, table in (("key", document["schema"]), ("aggregate", document)):
        if name.rpartition(".")[2] in table:
            raise UsageError(name, "is what the statement says", "remove it from the job file")
    document["schema"]["key"] = [
        {"column": columns[g.name], "type": KEYS[g.type]} for g in parsed.groups
    ]
    document["aggregate"] = tomlkit.aot()
    for function in parsed.functions:
        document["aggregate"].append(_aggregate(function, columns, bits))
    options = parsed.options
    privacy = document.setdefault("privacy", tomlkit.table())
    require(options.rows or "contributions" in privacy, "stream-contributions")
    _agree(privacy, "epsilon", options.epsilon)
    _agree(privacy, "delta", options.delta)
    if refuses(options.delta, False):  # the statement says so, or was refused
        _agree(privacy, "allow_large_delta", True)
    _agree(privacy, "contributions", options.rows or privacy["contributions"])
    if options.min_units > 1:
        _agree(privacy, "pre_threshold", options.min_units - 1)
    return tomlkit.dumps(document)


def _agree(privacy: Any, name: str, value: float) -> None:
    if name in privacy and privacy[name] != value:
        raise UsageError(
            job_field(name), "differs from what the statement says", "remove it, or correct one"
        )
    privacy[name] = value


def _columns(parsed: Statement, job_tables: Readable) -> tuple[dict[str, str], QueryConfig | None]:
    """The input column of each group and argument, and the query that makes them.

    A statement that takes columns of the source as they are needs no query: its job is the one
    that would be written by hand.
    """
    arguments = {f.name: f.argument for f in parsed.functions if f.argument is not None}
    expressions = {g.name: g.expression for g in parsed.groups} | arguments
    own = {name: _own(node, job_tables) for name, node in expressions.items()}
    bare = isinstance(parsed.source.args["from_"].this, exp.Table) and not any(
        parsed.source.args.get(part) for part in ("joins", "where")
    )
    plain = all(own[g.name] == g.name for g in parsed.groups)
    plain &= all(own[name] and type_of(node) in _NUMBERS for name, node in arguments.items())
    if bare and plain:
        return {name: column or "" for name, column in own.items()}, None
    names = {g.name: g.name for g in parsed.groups}
    for i, name in enumerate(arguments):
        names[name] = next(
            n
            for n in (f"_x{i}" + "_" * k for k in range(99))
            if n not in job_tables.reads and n not in names.values()
        )
    items = [
        exp.alias_(_number(node) if name in arguments else node.copy(), names[name], quoted=True)
        for name, node in expressions.items()
    ]
    tree = _whole(parsed, items)
    rows = job_tables.tables.rows
    used = {c.name for c in tree.find_all(exp.Column)} & set(rows.columns)
    used -= {rows.unit}
    tables = {t.name for t in tree.find_all(exp.Table)}
    look_ups = tuple(one for one in job_tables.look_ups if one.name.lower() in tables)
    text = tree.sql(dialect=DpSql, comments=False)
    types = {job_tables.reads[name]: rows.columns[name] for name in sorted(used)}
    return names, QueryConfig(job_tables.tables.source, types, text, look_ups)


def _own(node: exp.Expr, job_tables: Readable) -> str | None:
    """The source's own column that an expression is."""
    if isinstance(node, exp.Column) and node.name in job_tables.tables.rows.columns:
        return job_tables.reads[node.name]
    return None


def _number(node: exp.Expr) -> exp.Expr:
    """An argument as a number."""
    if type_of(node) in _NUMBERS:
        return node.copy()
    return exp.Cast(this=node.copy(), to=exp.DataType.build("DOUBLE"))


def _plain(config: QueryConfig | LookUpConfig) -> dict[str, Any]:
    """What a table of the job says, without what it leaves out."""
    fields = {k: v for k, v in msgspec.to_builtins(config).items() if v not in (None, ())}
    if isinstance(config, QueryConfig) and config.look_up:
        fields["look_up"] = [_plain(one) for one in config.look_up]
    return fields


def _inline(values: dict[str, str]) -> Any:
    table = tomlkit.inline_table()
    table.update(values)
    return table


def _query_table(query: QueryConfig) -> Any:
    table = tomlkit.table()
    table.add("table", query.table)
    table.add("columns", _inline(query.columns or {}))
    table.add("text", query.text)
    if query.look_up:
        look_ups = tomlkit.aot()
        for one in query.look_up:
            item = tomlkit.table()
            for name, value in _plain(one).items():
                item.add(name, _inline(value) if isinstance(value, dict) else value)
            look_ups.append(item)
        table.add("look_up", look_ups)
    return table


def _aggregate(function: Function, columns: dict[str, str], bits: int) -> Any:
    table = tomlkit.table()
    table.add("name", function.name)
    table.add("kind", KINDS[function.kind])
    if function.low is not None and function.high is not None:
        low, high = function.low, function.high
        table.add("column", columns[function.name])
        table.add("clamp", [low, high])
        integer = type_of(function.argument) == exp.DType.BIGINT if function.argument else False
        grid = grid_of(low, high, bits, integer)
        if grid != 1.0:
            table.add("grid", grid)
    msgspec.convert(table.unwrap(), Aggregate)
    return table


def grid_of(low: float, high: float, bits: int, integer: bool) -> float:
    """The step that values are counted in: 1 for whole numbers, else the largest power of two with
    more than 2^(bits - 1) of them in the largest of |low|, |high| and high - low."""
    most, step = max(abs(low), abs(high), high - low), 1.0
    while most / step > 2.0**bits:
        step *= 2
    while most / step <= 2.0 ** (bits - 1) and not (integer and step == 1.0):
        step /= 2
    return step
