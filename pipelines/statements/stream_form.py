"""Which statements a stream can answer: their form, options, functions and groups.

A stream publishes releases: group columns, functions that have a running form, and their sds.  What
would be computed from an answer, or would need the whole of a table, is refused with its place.
"""

import msgspec
from sqlglot import exp

from dpstream.accounting.errors import InvariantError
from dpstream.accounting.fields import FieldType, KindName
from dpstream.accounting.limits import MAX_KEY_COLUMNS
from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.functions import Kind
from dpstream.pipelines.statements.options import Options, options_of
from dpstream.pipelines.statements.resolve import inlined, parsed
from dpstream.pipelines.statements.statement import Statement

#: Options that mean nothing, or something else, in a stream.
_TABLES_ONLY = ("max_groups_contributed", "contribution_norm")
#: Types of group columns, as types of a key.
KEYS: dict[exp.DType, FieldType] = {
    exp.DType.TEXT: "string",
    exp.DType.BIGINT: "int",
    exp.DType.BOOLEAN: "bool",
    exp.DType.VARBINARY: "bytes",
}
#: Functions with a running form, and the kind of aggregate that each is.
KINDS: dict[Kind, KindName] = {"count": "count", "units": "units", "sum": "sum", "mean": "mean"}


def stream_options(node: exp.Expr, grouped: bool, normed: bool) -> Options:
    """The options of a statement that becomes a stream; C is 0 where it is left to the job.

    Raises:
        DpstreamError: one is missing, out of range, or means nothing in a stream.
    """
    for option in node.expressions:
        require(option.name not in _TABLES_ONLY, "stream-option", option)
    require(not normed, "stream-bounds", node)
    options = options_of(node, False, False)
    require(any(option.name == "delta" for option in node.expressions), "delta", node)
    for name, usual in (
        ("mechanism", ("auto", "gaussian")),
        ("selection", ("thresholds",)),
        ("optimise", ("limit",)),
    ):
        option = {"selection": "group_selection_strategy"}.get(name, name)
        at = next((o for o in node.expressions if o.name == option), node)
        require(getattr(options, name) in usual, "stream-option", at)
    has_rows = any(option.name == "max_rows_contributed" for option in node.expressions)
    return options if has_rows else msgspec.structs.replace(options, rows=0)


def checked_form(text: str) -> None:
    """Refuse what works on an answer: a stream has releases, which are computed on elsewhere.

    Raises:
        DpstreamError: says where.
    """
    tree = inlined(parsed(text))
    dp_selects = [node for node in tree.find_all(exp.Select) if node.args.get("hint") is not None]
    require(dp_selects, "no-dp-select")
    require(len(dp_selects) == 1, "one-dp-select", dp_selects[-1].args["hint"])
    for part in ("having", "order", "limit", "offset", "distinct"):
        require(dp_selects[0].args.get(part) is None, "stream-answer", dp_selects[0].args.get(part))
    require(tree is dp_selects[0], "stream-answer", tree)
    for option in dp_selects[0].args["hint"].expressions:
        selects = option.name == "group_selection_strategy"
        word = option.expression.name.upper() if selects else ""
        require(word != "PUBLIC_GROUPS", "stream-option", option)


def check_functions(statement: Statement, text: str) -> None:
    """Functions that run on and on, with bounds where they need them; plain group columns.

    Raises:
        DpstreamError: says where it is otherwise.
    """
    tree = inlined(parsed(text))
    items = {item.alias_or_name: item for item in tree.args["expressions"]}
    for function in statement.functions:
        at = items.get(function.name, tree)
        counts = function.kind in ("count", "units")
        supported = function.kind in KINDS and (
            function.kind != "count" or function.argument is None
        )
        require(supported, "stream-function", at)
        require(counts == (function.low is None) and not function.norm, "stream-bounds", at)
        require(not function.report, "stream-answer", at)
    labels = {f.name for f in statement.functions} | {g.name for g in statement.groups}
    if not isinstance(statement.outer, exp.Select):
        raise InvariantError("isinstance(asked.outer, exp.Select)")
    for item in statement.outer.expressions:
        plain = isinstance(item.unalias(), exp.Column) and item.unalias().name == item.alias
        at = items.get(item.alias_or_name, tree)
        require(plain and item.alias in labels, "stream-answer", at)
    require(
        len(statement.outer.expressions) == len(labels), "stream-answer", tree.args.get("group")
    )
    group = tree.args.get("group")
    require(1 <= len(statement.groups) <= MAX_KEY_COLUMNS, "stream-groups", group or tree)
    for one in statement.groups:
        require(one.type in KEYS, "stream-groups", group)
