"""Every system in a small folder of its own: what writes once, what only reads, what is published.

Commands are called in this process.  ``charge`` is typed first, and typing it again is the second
run; ``reads`` are typed after it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.secret import new_secret
from tests import accounts
from tests.faults import damage
from tests.pipelines.session.tables import RECORDS, SMALL_PROJECT
from tests.pipelines.sql.asking import COUNTED, data_set, dp
from tests.pipelines.tabulation.office import office, project
from tests.pipelines.workload.survey import survey, write

Words = tuple[str, ...]


class System(NamedTuple):
    """Commands and files of a system; paths are below its folder.

    Attributes:
        ledger: its file.
        make: writes the inputs; before: commands before the charge.
        out: folders of what is published; letters: of dead letters.
    """

    ledger: str
    make: Callable[[Path], None]
    charge: Words
    reads: tuple[Words, ...]
    before: tuple[Words, ...] = ()
    out: str | None = None
    letters: str | None = None


def _stream(folder: Path) -> None:
    damage.write_job(folder, "parquet")
    with open(folder / "in.csv", "a") as file:
        file.write("90,page,no time\n")


def _survey(folder: Path) -> None:
    survey(folder, 300)
    write(folder / "tables.json", [{"ways": 2}, {"ways": 1}])


def _session(folder: Path) -> None:
    folder.mkdir()
    (folder / "small.csv").write_text(RECORDS)
    accounts.write(folder / "dpstream.toml", SMALL_PROJECT.format(key="22" * 32, more=""))


def _sql(folder: Path) -> None:
    folder.mkdir()
    data_set(folder)


def _census(folder: Path) -> None:
    folder.mkdir()
    new_secret(folder / "noise.secret")
    made = office(folder)
    project(folder, made, secret="file:noise.secret", limit=(30.0, 1e-9)).rename(
        folder / "dpstream.toml"
    )
    with open(folder / "data" / "person-records.txt", "a") as file:
        file.write("200|1|True|01|001|000100|1000" + "|01" * 10 + "\n")


_ASK = (
    "sql",
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.5) COUNT(*) AS n FROM small"
    " WHERE epsilon >= 1",
)
SYSTEMS = {
    "stream": System(
        "book/ledger.db",
        _stream,
        ("run",),
        (
            ("plan",), ("report",), ("account", "show", "book/ledger.db"),
            ("account", "show"), ("state", "info"),
        ),
        out="out",
        letters="dead_letter/daily",
    ),
    "workload": System(
        "ledger.db",
        _survey,
        ("workload", "answer", "asked.json", "--out", "out", "--cache", "cache"),
        (("account", "show", "ledger.db"),),
        out="out",
        letters="dead_letter/people",
    ),
    "tables": System(
        "ledger.db",
        _survey,
        ("workload", "answer", "tables.json", "--tables", "--out", "out", "--cache", "cache"),
        (("account", "show", "ledger.db"),),
        out="out",
    ),
    "sql": System(
        "ledger.db",
        _sql,
        ("sql", dp(f"page, {COUNTED} AS n") + " ORDER BY page"),
        (
            ("account", "show", "ledger.db"),
            ("sql", dp(f"page, {COUNTED} AS n"), "--explain"),
        ),
    ),
    "session": System(
        "ledger.db",
        _session,
        _ASK,
        (
            (*_ASK, "--explain"), ("sql", "SELECT * FROM dpstream.budget"),
            ("account", "show", "ledger.db"),
        ),
        before=(("table", "init", "small"),),
    ),
    "census": System(
        "persons.account.db",
        _census,
        ("census", "execute", "--out", "out"),
        (("account", "show", "persons.account.db"),),
        out="out",
        letters="dead_letter/out",
    ),
}  # fmt: skip


def call(*words: str) -> Result:
    """A command in the current folder."""
    return CliRunner().invoke(cli, list(words))


def done(*words: str) -> Result:
    """A command that does not fail."""
    result = call(*words)
    assert result.exit_code == 0, (words, result.output)
    return result


def charged(system: System) -> None:
    """Charge a system whose inputs are in the current folder."""
    for words in system.before:
        done(*words)
    done(*system.charge)
