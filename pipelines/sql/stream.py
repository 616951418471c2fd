"""A statement as a stream job: it becomes a job's key, aggregates, C and query.

The job defines windows, trigger times, table, sink and store; the statement defines the rest.
Nothing runs here: the result is a complete job of the project, for any runner.

| statement | job |
| --- | --- |
| ``epsilon``, ``delta`` | ``budget.epsilon``, ``budget.delta`` |
| ``max_rows_contributed`` | ``contributions``, C: rows of a unit that count |
| ``min_privacy_units_per_group = m`` | ``mechanism.pre_threshold = m - 1`` |
| GROUP BY | ``key`` |
| COUNT(*), SUM, COUNT(DISTINCT unit) | aggregates of kind ``count``, ``sum``, ``units`` |
| AVG | kind ``mean``, the engine's own: a noisy centred sum over the noisy count |
| FROM, WHERE, expressions, public look-ups | ``query`` (`row_query`), if there are any |

At most C rows of a unit count, in all groups together.  Bounds are those of one row, in either
spelling: a stream holds every row within them, and a unit adds at most C rows.  A row whose group
or argument is NULL is a dead letter, whereas an answer from tables would count it in COUNT(*).
What both the job and the statement define must be the same.
"""

import copy
from typing import Any, NamedTuple

import msgspec
import tomlkit
from sqlglot import exp

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.fields import Field
from dpstream.accounting.strength import refuses
from dpstream.pipelines.jobs.job import Job, job_in
from dpstream.pipelines.project.copying import (
    append_section,
    check_new_name,
    copied_section,
    inline,
    read_project_text,
    section_text,
    set_field,
    sink_of_copy,
    with_job,
)
from dpstream.pipelines.project.project import Project
from dpstream.pipelines.project.source import described, query_of, source_of, source_path
from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.forms import type_of
from dpstream.pipelines.statements.functions import Function
from dpstream.pipelines.statements.ownership import NUMBERS
from dpstream.pipelines.statements.row_query import Readable, check_row_local, readable
from dpstream.pipelines.statements.statement import (
    KEYS,
    KINDS,
    Statement,
    check_functions,
    checked_form,
    statement_of,
    stream_options,
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once

#: log2 of the steps that bounds are cut into; fewer where the noise would leave its range.
BITS = tuple(range(16, 3, -2))


class StreamJob(NamedTuple):
    """A job from a section and a statement.

    Attributes:
        job: the checked job.
        section: ``[job.NAME]`` with what the statement defines.
        query: the text that every row goes through first; ``None`` if none is needed.
    """

    job: Job
    section: dict[str, Any]
    query: str | None


def stream_job(project: Project, name: str | None, statement: str) -> StreamJob:
    """Return the job of a statement; no row is read.

    Args:
        name: name of the job that lacks what the statement defines; ``None``: the only one.
        statement: one differentially private SELECT.

    Raises:
        DpstreamError: the job or the statement cannot be used, or not privately as a stream.
    """
    name, section = project.job_as_written(name)
    job_tables = _readable(project, name, section)
    checked_form(statement, job_tables.tables)
    parsed = statement_of(statement, job_tables.tables, stream_options)
    require(parsed.functions, "no-function")
    check_row_local(_select_from_private(parsed, []), job_tables.tables)
    check_functions(parsed, statement)
    fits: UsageError | None = None
    for bits in BITS:
        filled, query = _filled(name, section, parsed, job_tables, bits)
        job = job_in(with_job(project, name, filled), name, query=query)
        try:
            allocate(job.plan)
        except UsageError as error:  # noise beyond its range: a coarser grid may have it inside
            fits = error
            continue
        return StreamJob(job, filled, query)
    raise required(fits, "fits is there")


def write_job(project: Project, translation: StreamJob, new: str) -> str:
    """Write the job under a new name into the project file, and its query beside it.

    Returns:
        where its releases go.

    Raises:
        UsageError: the name is taken by something else.
        RunError: a file cannot be written.
    """
    check_new_name(project, new, "--emit", existing=new != translation.job.name)
    text, filled = read_project_text(project), translation.section
    section = copied_section(text, translation.job.name, new)
    for field in ("budget", "mechanism"):
        for leaf, value in filled.get(field, {}).items():
            if section.get(field, {}).get(leaf) != value:
                set_field(section, field, leaf, value)
    section["contributions"] = filled["contributions"]
    section["key"] = inline(filled["key"])
    for aggregate, part in filled["aggregate"].items():
        section.append(tomlkit.key(["aggregate", aggregate]), inline(part))
    if translation.query is not None:
        section["query"] = f"{new}.sql"
        path = project.folder / f"{new}.sql"
        data = f"{translation.query}\n".encode()
        with file_errors("--emit", "cannot be written"):
            if not put_once(path, data) and path.read_bytes() != data:
                raise UsageError("--emit", f"{path.name} exists and says otherwise", "rename it")
    written = section_text(new, section)
    append_section(project, new, text, written, "--emit")
    return sink_of_copy(new, written)


def _readable(project: Project, name: str, section: dict[str, Any]) -> Readable:
    """Return what statements about a job can name."""
    for field in ("key", "aggregate", "query"):
        if field in section:
            raise UsageError(
                f"job.{name}.{field}", "is what the statement says", "remove it from the job"
            )
    table_name = section.get("table")
    if not isinstance(table_name, str):
        raise UsageError(f"job.{name}.table", "is required", 'add table = "TABLE"')
    table, _, _, unit = described(project, name, table_name)
    source = source_of(project, table_name)
    folder = project.folder
    resolved = msgspec.structs.replace(
        source, path=source_path(folder, source), query=query_of(project, table_name)
    )
    unit_field = Field(required(table.unit_column, "a job's table has a unit column"), unit.type)
    return readable(resolved, unit_field, folder)


def _select_from_private(parsed: Statement, items: list[exp.Expr]) -> exp.Select:
    """Return the private relation with a select list."""
    query = parsed.source.copy()
    query.set("expressions", items)
    return query


def _filled(
    name: str, section: dict[str, Any], parsed: Statement, job_tables: Readable, bits: int
) -> tuple[dict[str, Any], str | None]:
    """Return the job with what the statement defines, and the text of its query."""
    filled = copy.deepcopy(section)
    columns, query = _columns(parsed, job_tables)
    filled["key"] = [{"column": columns[g.name], "type": KEYS[g.type]} for g in parsed.groups]
    # As for questions (`query_plan`), types that only a Parquet file says do not decide.
    typed = bool(job_tables.tables.rows.fields)
    filled["aggregate"] = {f.name: _aggregate(f, columns, bits, typed) for f in parsed.functions}
    options = parsed.options
    require(options.rows or "contributions" in filled, "stream-contributions")
    budget = filled.setdefault("budget", {})
    budget.setdefault("covers", "lifetime")
    _agree(budget, f"job.{name}.budget", "epsilon", options.epsilon)
    _agree(budget, f"job.{name}.budget", "delta", options.delta)
    rows = options.rows or filled["contributions"]
    _agree(filled, f"job.{name}", "contributions", rows)
    mechanism: dict[str, float] = {}
    if refuses(options.delta, False):  # the statement says so, or was refused
        mechanism["allow_large_delta"] = True
    if options.min_units > 1:
        mechanism["pre_threshold"] = options.min_units - 1
    for field, value in mechanism.items():
        _agree(filled.setdefault("mechanism", {}), f"job.{name}.mechanism", field, value)
    return filled, query


def _agree(table: dict[str, Any], where: str, field: str, value: float) -> None:
    if field in table and table[field] != value:
        raise UsageError(
            f"{where}.{field}", "differs from what the statement says", "remove or correct it"
        )
    table[field] = value


def _columns(parsed: Statement, job_tables: Readable) -> tuple[dict[str, str], str | None]:
    """Return the input column of each group and argument, and the text of the query that makes
    them.

    A statement that uses columns of the source unchanged needs no query: its job is the one
    that would be written by hand.
    """
    arguments = {f.name: f.argument for f in parsed.functions if f.argument is not None}
    expressions = {g.name: g.expression for g in parsed.groups} | arguments
    own = {name: _own(node, job_tables) for name, node in expressions.items()}
    bare = isinstance(parsed.source.args["from_"].this, exp.Table) and not any(
        parsed.source.args.get(part) for part in ("joins", "where")
    )
    plain = all(own[g.name] == g.name for g in parsed.groups)
    plain &= all(own[name] and type_of(node) in NUMBERS for name, node in arguments.items())
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
    return names, _select_from_private(parsed, items).sql(dialect=DpSql, comments=False)


def _own(node: exp.Expr, job_tables: Readable) -> str | None:
    """Return the source's own column that an expression is, if it is one."""
    if isinstance(node, exp.Column) and node.name in job_tables.tables.rows.columns:
        return job_tables.reads[node.name]
    return None


def _number(node: exp.Expr) -> exp.Expr:
    """Return an argument as a number."""
    if type_of(node) in NUMBERS:
        return node.copy()
    return exp.Cast(this=node.copy(), to=exp.DataType.build("DOUBLE"))


def _aggregate(
    function: Function, columns: dict[str, str], bits: int, typed: bool
) -> dict[str, Any]:
    """Return one published column, as the project file has it."""
    aggregate: dict[str, Any] = {"kind": KINDS[function.kind]}
    if function.low is not None and function.high is not None:
        low, high = function.low, function.high
        argument = function.argument
        integer = typed and argument is not None and type_of(argument) == exp.DType.BIGINT
        aggregate |= {"column": columns[function.name], "bounds": [low, high]}
        grid = grid_of(low, high, bits, integer)
        if grid != 1.0:
            aggregate["grid"] = grid
    return aggregate


def grid_of(low: float, high: float, bits: int, integer: bool) -> float:
    """Return the step that values are counted in.

    It is 1 for whole numbers, else the largest power of two with more than 2^(bits - 1) of them in
    the largest of |low|, |high| and high - low.
    """
    most, step = max(abs(low), abs(high), high - low), 1.0
    while most / step > 2.0**bits:
        step *= 2
    while most / step <= 2.0 ** (bits - 1) and not (integer and step == 1.0):
        step /= 2
    return step
