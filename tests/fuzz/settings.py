"""Files that people write: a job, a catalog, a session's table, a workload, a statement of SQL.

Each is accepted or refused with a public error that can be printed; white space and comments, which
mean nothing, change nothing.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.grids import grids_of
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of, stage_one
from dpstream.pipelines.workload.planning import read_workload
from tests.fuzz.texts import WrongError
from tests.pipelines.sql.shop import shop

_TOML = [b"=", b"[", b"]", b"[[", b"]]", b"{", b"}", b'"', b"'''", b'"""', b"#", b"\n", b",",
         b"true", b"null", b'"\\u0000"', b'"\\u001b"', b"inf", b"nan", b'"1d"', b'"0s"', b'"-1h"',
         b"2024-02-30",
         b"1e999", b"[table.x]\n", b"[data_set.d]\n", b"x = 1\n", b'"\xf0\x9f\x98\x80"', b"\xff",
         b"path = 7\n", b"[table.t.quota]\n", b'".."', b'"/"', b'"s3://x"', b"9" * 30]  # fmt: skip
TOKENS = {
    "job": _TOML,
    "catalog": _TOML,
    "table": _TOML,
    "workload": [b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"true", b"NaN", b"-1",
                 b"1e400",
                 b"0.5", b'"ways": 2', b'"values": []', b'"edges": [1]', b'"range"', b'"prefix"',
                 b'"identity"', b'"total"', b'"\\ud800"', b"[" * 3000, b"1" * 500],
    "sql": [b"(", b")", b",", b"'", b'"', b"`", b"--", b"/*", b"*/", b";", b"SELECT ", b"FROM ",
            b"NULL", b"DISTINCT ", b"OVER ()", b"GROUP BY ", b"WITH ", b"UNION ALL ", b"epsilon = ",
            b"OPTIONS()", b"=>", b"CAST(1 AS ", b"INTERVAL 1 DAY", b"@x", b"\\", b"(((((((((",
            b"NOT ", b"-", b"0x", b"r'", b"{{", b"STRUCT(1)", b"[1]", b"UNNEST("],
}  # fmt: skip
#: What is appended to a text and means nothing.
_NOTHING = {"workload": b"\n \t", "sql": b" -- nothing\n"}
_LONGEST_SAID = 4000


def target(name: str) -> Callable[[bytes], None]:
    """How a text of a kind is checked."""
    return lambda data: _check(name, data)


def _check(name: str, data: bytes) -> None:
    first = _outcome(name, data)
    if data.count(b'"""') + data.count(b"'''") or len(data) > 500_000 or not _ends_clean(data):
        return
    again = _outcome(name, data + _NOTHING.get(name, b"\n# nothing\n\n"))
    if again != first:
        raise WrongError(f"another meaning: {first[:200]} and {again[:200]}")


def _ends_clean(data: bytes) -> bool:
    """Whether nothing is open at the end, which an appended comment would change."""
    last = data.rsplit(b"\n", 1)[-1]
    return not last or (last.endswith(b"}") and not last.count(b'"') % 2 + last.count(b"'") % 2)


def _outcome(name: str, data: bytes) -> str:
    try:
        return repr(READERS[name](data))
    except DpstreamError as error:
        text = str(error)
        if not error.field or not error.rule or len(text) > _LONGEST_SAID:
            raise WrongError(f"an error without a field, a rule or an end: {text[:200]}") from None
        if not all(char.isprintable() or char == "\n" for char in text):
            raise WrongError(f"an error that a terminal obeys: {text[:200]!r}") from None
        return text


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dpstream-fuzz-"))
    for name in ("in.csv", "orders.csv", "pages.csv"):
        (folder / name).write_text("user,page,time,price,customer,product,title\n")
    (folder / "keys.csv").write_text("page,day\np1,3\n")
    (folder / "noise.secret").write_text("3f" * 32 + "\n")
    os.chmod(folder / "noise.secret", 0o600)
    return folder


def _file(name: str, load: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        path = _folder() / name
        path.write_bytes(data)
        return load(path)

    return read


def _statement(data: bytes) -> str:
    question = question_of(data.decode(errors="replace"), _shop())
    grids = grids_of(question.gridded.sketched())
    return str(stage_one(question.per_column, _shop(), grids).sql("duckdb", comments=False))


_shop = functools.cache(shop)


def _workload(path: Path) -> str:
    workload = read_workload(path)
    json.loads(path.read_bytes())  # another reader accepts it too
    return f"{workload.attributes} {len(workload.products)}"


READERS: dict[str, Callable[[bytes], Any]] = {
    "job": _file("dpstream.toml", load_job),
    "catalog": _file("dpstream.toml", load_catalog),
    "table": _file("dpstream.toml", load_config),
    "workload": _file("asked.json", _workload),
    "sql": _statement,
}
