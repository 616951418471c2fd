"""A project file in Python: its jobs, tables and data sets by the names that commands use.

    shop = dpstream.project("dpstream.toml")
    shop.run("daily")
    print(shop.sql("SELECT ...").table)
    dpstream.count(visits, unit="customer", key="page", epsilon=1.0, account=shop.account())

Each method imports what it needs, so that a question about a table in memory imports no Beam.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.frames.account import DataSetAccount
from dpstream.pipelines.project.project import load_project
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.pipelines.session.session import Session
    from dpstream.pipelines.sql.dbapi import Connection
    from dpstream.pipelines.sql.receipt import SqlAnswer
    from dpstream.pipelines.stream.run import Result


def project(
    path: str | Path | None = None,
    *,
    environment: str | None = None,
    settings: Sequence[str] = (),
) -> "ProjectFile":
    """Open a project file, to run its jobs and ask questions about its data sets.

    Args:
        path: the file or its folder; ``None``: the file that commands find from the current
            folder.
        environment: the name of an environment, as for ``--env``.
        settings: places, each ``FIELD=VALUE``, as for ``--set``.

    Raises:
        UsageError: there is no such file, or it is not a project file.
    """
    return ProjectFile(path, environment, settings)


class ProjectFile:
    """A project file; `project` opens it.

    Every method reads the file again, as every command does, so that a change takes effect at
    once.

    Attributes:
        path: the file's absolute path.
    """

    def __init__(
        self, path: str | Path | None, environment: str | None, settings: Sequence[str]
    ) -> None:
        self.path = load_project(path, environment, settings).path
        self._environment, self._settings = environment, tuple(settings)

    def job(self, name: str | None = None) -> "Job":
        """Return a checked job.

        Args:
            name: the job's name; ``None``: the only job of the file.

        Raises:
            UsageError, PolicyError: the job cannot be used, or has no guarantee.
        """
        from dpstream.pipelines.jobs.job import load_job

        return load_job(self.path, name, environment=self._environment, settings=self._settings)

    def run(self, name: str | None = None, **how: Any) -> "Result":
        """Run a job to its end, as ``dpstream run`` does: charge the run, then read records.

        Args:
            name: the job's name; ``None``: the only job of the file.
            how: further arguments of `stream.run.run_job` (``runner``, ``through``, ``fresh``).

        Raises:
            DpstreamError: the run was refused, or failed.
        """
        from dpstream.pipelines.stream.run import run_job

        return run_job(self.job(name), **how)

    def sql(
        self,
        statement: str,
        data_set: str | None = None,
        *,
        fresh: bool = False,
        as_of: str = "",
        runner: "Runner | None" = None,
    ) -> "SqlAnswer":
        """Return the private answer of a statement about the tables of a data set.

        Args:
            statement: in GoogleSQL's syntax, as for ``dpstream sql``.
            data_set: its name in the file; ``None``: the only one.
            fresh: ask again, at a new charge, a question that was answered before.
            as_of: a public label of the state of the data, e.g. a date.
            runner: the Beam runner whose workers read the rows; ``None``: this process reads them.

        Raises:
            DpstreamError: the statement cannot be used, or not privately as it is written, or its
                charge exceeds the account's limit.
        """
        from dpstream.pipelines.sql.ask import ask

        connection = self.connect(data_set)
        return ask(connection.catalog, statement, Asking(fresh, as_of), runner=runner)

    def connect(self, data_set: str | None = None) -> "Connection":
        """Return a DB-API connection to the tables of a data set; see `sql.dbapi.connect`."""
        from dpstream.pipelines.sql.dbapi import connect

        return connect(self.path, data_set, environment=self._environment, settings=self._settings)

    def session(self, table: str | None = None, **how: Any) -> "Session":
        """Return a session on a table in which each record has its own budget.

        Args:
            table: its name in the file; ``None``: the only one.
            how: further arguments of `session.session.Session` (``analyst``, ``runner``).
        """
        from dpstream.pipelines.session.session import Session

        return Session(
            self.path, table, environment=self._environment, settings=self._settings, **how
        )

    def account(self, data_set: str | None = None) -> DataSetAccount:
        """Return the account and the secret of a data set, for questions about tables in memory.

        Args:
            data_set: its name in the file; ``None``: the only one.

        Raises:
            UsageError: the data set has no account in the file.
        """
        from dpstream.pipelines.project.data_sets import account_of, secret_of

        opened = load_project(self.path, self._environment, self._settings)
        name, _ = opened.data_set(data_set, "data_set")
        place = account_of(opened, name)
        keep_beside(place.path)
        return DataSetAccount(place, secret_of(opened, name))
