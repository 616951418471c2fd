"""A project file in Python: its jobs, tables and data sets by the names that commands use.

    shop = dpstream.project("dpstream.toml")
    shop.run("daily")
    print(shop.sql("SELECT ...").table)
    dpstream.count(visits, unit="customer", key="page", epsilon=1.0, account=shop.account())

Each method imports what it needs, so that a question about a table in memory imports no Beam.

**A data set's account and secret** are for questions and runs that Python code starts by itself.
They are had without Beam too, so that a question about a table in memory can have an account.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.question import Asking
from dpstream.state.ledger.open import AccountPlace, check_names, place_below
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan
    from dpstream.dp_transforms.run import Run
    from dpstream.pipelines.door.dbapi import Connection
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.pipelines.sql.receipt import SqlAnswer
    from dpstream.pipelines.stream.run import Result


class Charged(NamedTuple):
    """A plan, and the account that its runs are charged in; a plan of Python has no name."""

    plan: "Plan"
    ledger: AccountPlace | None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class DataSetAccount:
    """A data set's account, and a reference to its secret; made by `account` or
    ``ProjectFile.account``.

    Attributes:
        place: the account's file or database, its data set and id.
        secret: where the secret is; questions need it, because an answered question is
            recognised by a digest that is keyed with the secret.
    """

    place: AccountPlace
    secret: SecretSource = dataclasses.field(default_factory=SecretSource)

    def check(self, plan: "Plan") -> None:
        """Raise the error that ``charge`` would raise now; write no entry.

        Raises:
            PolicyError: the charge would exceed the account's limit.
        """
        from dpstream.pipelines.jobs.charging import check_charge

        check_charge(Charged(plan, self.place))

    def charge(self, run: "Run") -> None:
        """Charge a run, once for each run id and epoch, before any noise is drawn.

        Raises:
            PolicyError: the charge exceeds the account's limit; or the store is a copy, is older
                than its account, or was restored (a restored store must be compared with what the
                sink has published, and only a job knows its sink).
        """
        from dpstream.pipelines.stream.begin import charge  # with Beam: only of a run

        if run.open().restoring:
            raise PolicyError(
                "store",
                "was restored, and has to be compared with what its run has published",
                "go on with `dpstream run`",
            )
        charge(Charged(run.plan, self.place), run)


def account(
    path: str | Path,
    data_set: str,
    *,
    id: str = "",
    secret: str | SecretSource | None = None,
) -> DataSetAccount:
    """Return the account of a data set that is not described in a project file.

    ``dpstream account create`` makes the account, with its limit, and prints its id.  With a
    project file, ``dpstream.project().account(NAME)`` returns the account of a data set.  Without
    one the unit's column must have the name of the account's unit.

    Args:
        path: the account's file or URL.
        data_set: the name of the data set in the account.
        id: the account's id.
        secret: a reference to the data set's secret: ``file:PATH``, ``env:NAME`` or ``gcp:...``.
            Paths start in the folder that is current now, whatever it is later.

    Raises:
        UsageError: the id is missing, or an argument cannot be used.
    """
    if not id:
        raise UsageError(
            "account",
            "needs the id of an account",
            "make one with `dpstream account create PATH --data-set NAME --unit NAME --epsilon E "
            "--delta D`, "
            "and write id='...' as it prints it",
        )
    check_names(data_set, id)
    place = place_below(Path.cwd(), str(path))
    keep_beside(place)
    source = SecretSource.of(secret).below(Path.cwd())
    return DataSetAccount(AccountPlace(place, data_set, id), source)


def checked_account(given: DataSetAccount | None, how: Asking) -> DataSetAccount | None:
    """Return the account that a question is charged in; ``None`` if it is charged nowhere.

    Raises:
        UsageError: the argument is not an account, or has no secret; or ``fresh`` or ``as_of``,
            which have no meaning without an account, are given without one.
    """
    if given is None:
        for argument in [name for name in ("fresh", "as_of") if getattr(how, name)]:
            raise UsageError(
                argument,
                "has no meaning without an account: every answer has noise of its own",
                "leave it out, or give account=dpstream.project().account()",
            )
        return None
    if not isinstance(given, DataSetAccount):
        raise UsageError(
            "account",
            "is no account that can be named",
            "write account=dpstream.project().account(), or account=dpstream.account('ledger.db',"
            " 'visits', id='...', secret='file:PATH')",
        )
    if not given.secret.given:
        raise UsageError(
            "secret",
            "is required with an account: the same question is known again by it",
            "make one with `dpstream secret new noise.secret`, once for the data set, and write "
            "dpstream.account(..., secret='file:noise.secret')",
        )
    return given


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
        from dpstream.pipelines.project.project import load_project

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
        analyst: str = "analyst",
    ) -> "SqlAnswer":
        """Return the private answer of a statement about the tables of a data set.

        Args:
            statement: in GoogleSQL's syntax, as for ``dpstream sql``.
            data_set: its name in the file; ``None``: the only one.
            fresh: ask again, at a new charge, a question that was answered before.
            as_of: a public label of the state of the data, e.g. a date.
            runner: the Beam runner whose workers read the rows; ``None``: this process reads them.
            analyst: who asks a table whose records have budgets of their own.

        Raises:
            DpstreamError: the statement cannot be used, or not privately as it is written, or its
                charge exceeds the account's limit.
        """
        with self.connect(data_set, runner=runner, analyst=analyst) as connection:
            return connection.door.answer(statement, Asking(fresh, as_of))

    def connect(self, data_set: str | None = None, **how: Any) -> "Connection":
        """Return a DB-API connection to the tables of a data set; see `door.dbapi.connect`."""
        from dpstream.pipelines.door.dbapi import connect

        places = {"environment": self._environment, "settings": self._settings}
        return connect(self.path, data_set, **places, **how)  # type: ignore[arg-type]

    def account(self, data_set: str | None = None) -> DataSetAccount:
        """Return the account and the secret of a data set, for questions about tables in memory.

        Args:
            data_set: its name in the file; ``None``: the only one.

        Raises:
            UsageError: the data set has no account in the file.
        """
        from dpstream.pipelines.project.project import account_of, load_project, secret_of

        opened = load_project(self.path, self._environment, self._settings)
        name, _ = opened.data_set(data_set, "data_set")
        place = account_of(opened, name)
        keep_beside(place.path)
        return DataSetAccount(place, secret_of(opened, name))
