"""PEP 249 for private answers: ``dpstream.connect().cursor().execute(sql)``.

    with dpstream.connect("dpstream.toml") as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(...) ...")
        rows, table = cursor.fetchall(), cursor.fetch_arrow_table()

A statement takes no parameters (every literal of it is public, and part of the question), and there
are no transactions: ``execute`` charges and commits an answer.  A statement that begins with
EXPLAIN returns its plan, reads no data and costs nothing.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpstream.accounting.errors import (
    DpstreamError,
    PolicyError,
    RunError,
    UsageError,
)
from dpstream.pipelines.door.route import Door
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.render.answer import python_values
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql.receipt import SqlAnswer
from dpstream.state.connecting import Closing

apilevel, threadsafety, paramstyle = "2.0", 1, "qmark"

Error = DatabaseError = DpstreamError
InterfaceError = ProgrammingError = UsageError
NotSupportedError = IntegrityError = PolicyError
OperationalError = InternalError = DataError = RunError
Row = tuple[Any, ...]


def connect(
    project: str | Path | None = None,
    data_set: str | None = None,
    *,
    environment: str | None = None,
    settings: Sequence[str] = (),
    runner: Runner | None = None,
    analyst: str = "analyst",
    held: bool = False,
) -> "Connection":
    """Connect to the tables of a data set.

    Args:
        project: the project file or its folder; ``None``: found from the current folder.
        data_set: name of the data set in the file; ``None``: the only one.
        environment: the value of ``--env``.
        settings: the values of ``--set``.
        runner: the runner whose workers read the rows; ``None``: this process.
        analyst: who asks tables whose records have budgets of their own.
        held: copy the coordinates of such records into memory, for many questions.

    Raises:
        DpstreamError: the file, or a table of the data set, cannot be used.
    """
    opened = load_project(project, environment, settings)
    return Connection(Door(opened, data_set, analyst, runner, held))


class Connection(Closing):
    """An open door to the tables of a project file; a context that closes it."""

    def __init__(self, door: Door) -> None:
        self._door: Door | None = door

    @property
    def door(self) -> Door:
        """The door.

        Raises:
            UsageError: the connection is closed.
        """
        if self._door is None:
            raise UsageError("connection", "is closed", "connect again")
        return self._door

    def cursor(self) -> "Cursor":
        """Return a new cursor."""
        _ = self.door  # refuses a closed connection
        return Cursor(self)

    def execute(self, statement: str, *, fresh: bool = False) -> "Cursor":
        """Return a new cursor with the answer of a statement.

        Args:
            fresh: ask again, at a new charge, a statement that was answered before.
        """
        return self.cursor().execute(statement, fresh=fresh)

    def commit(self) -> None:
        """Do nothing: every answer was committed before it was returned."""

    def close(self) -> None:
        """Close the connection; its cursors cannot be used any more."""
        if self._door is not None:
            self._door.close()
        self._door = None


class Cursor:
    """Asks statements and returns their rows.

    Attributes:
        answer: the answer of the last statement, with its intervals and its cost; ``None`` for
            EXPLAIN.
        arraysize: number of rows that ``fetchmany`` returns by default.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.answer: SqlAnswer | None = None
        self.arraysize = 1
        self._table: pa.Table | None = None
        self._next = 0

    @property
    def description(self) -> list[tuple[Any, ...]] | None:
        """Name and type of every column; ``None`` before a statement."""
        if self._table is None:
            return None
        return [(field.name, str(field.type), *(None,) * 5) for field in self._table.schema]

    @property
    def rowcount(self) -> int:
        """The number of rows of the answer; -1 before a statement."""
        return -1 if self._table is None else self._table.num_rows

    def execute(
        self,
        statement: str,
        parameters: Sequence[Any] = (),
        *,
        fresh: bool = False,
        as_of: str = "",
    ) -> "Cursor":
        """Ask a statement.

        Args:
            parameters: must be empty.
            fresh: ask again, at a new charge, a statement that was answered before.
            as_of: a public label of the state of the data that is asked about.

        Raises:
            DpstreamError: the statement was refused, or failed.
        """
        from dpstream.pipelines.ask.question import Asking
        from dpstream.pipelines.sql.explain import explained

        if parameters:
            raise UsageError("parameters", "are not supported", "write literals in the statement")
        door = self.connection.door
        self._next, self._table, self.answer = 0, None, None
        answer = door.answer(statement, Asking(fresh, as_of))
        self.answer, self._table = None if explained(statement) else answer, answer.table
        return self

    def executemany(self, statement: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Refuse: a statement takes no parameters."""
        raise UsageError("parameters", "are not supported", "execute one statement at a time")

    def fetchone(self) -> Row | None:
        """Return the next row."""
        rows = self.fetchmany(1)
        return rows[0] if rows else None

    def fetchmany(self, size: int | None = None) -> list[Row]:
        """Return the next rows."""
        rows = self._answered().slice(self._next, self.arraysize if size is None else size)
        self._next += rows.num_rows
        columns = [python_values(column) for column in rows.columns]
        return list(zip(*columns, strict=True))

    def fetchall(self) -> list[Row]:
        """Return all remaining rows."""
        return self.fetchmany(self._answered().num_rows)

    def fetch_arrow_table(self) -> pa.Table:
        """Return the whole answer as an Arrow table."""
        return self._answered()

    def setinputsizes(self, sizes: Sequence[Any]) -> None:
        """Do nothing, as PEP 249 allows."""

    def setoutputsize(self, size: int, column: int | None = None) -> None:
        """Do nothing, as PEP 249 allows."""

    def close(self) -> None:
        """Release the answer."""
        self._table = self.answer = None

    def __iter__(self) -> Iterator[Row]:
        while (row := self.fetchone()) is not None:
            yield row

    def _answered(self) -> pa.Table:
        _ = self.connection.door  # refuses a closed connection
        if self._table is None:
            raise UsageError("cursor", "has no answer", "execute a statement")
        return self._table
