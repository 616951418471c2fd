"""The open resources of a session: account, answers, secret, and the records once they are read."""

import contextlib
from typing import TYPE_CHECKING

from msgspec import UNSET

from dpstream.accounting.errors import InvariantError, PolicyError, UsageError, closest
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.receipt import header_of
from dpstream.pipelines.session.config import Config
from dpstream.pipelines.session.records.manifest import (
    MANIFEST,
    Manifest,
    check_account,
    read_manifest,
)
from dpstream.pipelines.sql.receipt import Header
from dpstream.state.connecting import Closing
from dpstream.state.ledger.contract import AnswerLog
from dpstream.state.ledger.events import RegionCharge
from dpstream.state.ledger.open import open_ledger
from dpstream.state.ledger.regions import RegionAccount

if TYPE_CHECKING:
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.pipelines.session.records.scan import Scan


class OpenTable(Closing):
    """An open table; a context that closes it.

    Attributes:
        config: the table's section of the project file.
        table, space: the public model, and the space of its dimensions.
        analyst: name of the analyst who asks.
        ledger, account, answers: those of its data set.
        held: whether records are copied into memory, for sessions with many questions.
        looking: whether nothing is asked: no file is made or written, and no record is read.
        runner: the runner whose workers read and draw; ``None``: this process.
    """

    def __init__(
        self,
        config: Config,
        analyst: str,
        held: bool = False,
        runner: "Runner | None" = None,
        looking: bool = False,
    ) -> None:
        if not analyst or not analyst.isprintable() or len(analyst) > 200:
            raise UsageError("--analyst", "must be a short printable name", "name who asks")
        self.config, self.analyst = config, analyst
        self.table: SessionTable = config.table
        self.space: Space = config.table.space
        self.ledger = open_ledger(config.account, looking)
        self.answers = AnswerLog(self.ledger, "session")
        self.held, self.runner, self.looking = held, runner, looking
        self._ring: KeyRing | None = None
        self._scan: Scan | None = None
        try:
            snapshot = config.snapshot if config.folder.is_dir() else None
            self.account = RegionAccount(
                self.ledger, config.table, config.rules, snapshot, looking=looking
            )
            if (config.folder / MANIFEST).exists():
                self.manifest()
        except BaseException:
            self.close()
            raise

    @property
    def ring(self) -> KeyRing:
        """The key ring of the secret, which is read when it is first needed.

        Raises:
            DpstreamError: there is no secret.
        """
        if self._ring is None:
            self._ring = self.config.secret_source().ring()
        return self._ring

    @property
    def insecure(self) -> bool:
        """Return whether noise is drawn with a fixed test secret."""
        return self.config.secret.insecure_test_secret is not None

    def manifest(self) -> Manifest:
        """Return the current version of the table; no record is read.

        Raises:
            DpstreamError: there is no table, it is another account's, or its manifest is damaged.
        """
        manifest = read_manifest(self.config.folder, self.table)
        check_account(manifest, self.ledger.history())
        return manifest

    def allotments(self) -> dict[str, tuple[str, RegionCharge]]:
        """Return the analyst's allotments that were not given up: run id and charge by name."""
        return self._allotments()[0]

    def given_up(self, name: str) -> int:
        """Return how many allotments of a name the analyst has given up."""
        return self._allotments()[1].get(name, 0)

    def _allotments(self) -> tuple[dict[str, tuple[str, RegionCharge]], dict[str, int]]:
        made, ended = dict[str, tuple[str, RegionCharge]](), dict[str, int]()
        for run_id, charge in self.account.history():
            concerns = charge.allots or charge.draws_on
            if charge.analyst != self.analyst or not concerns or charge.budget == "closed":
                continue
            answer = self.answers.read(run_id)
            points = UNSET if answer is None else header_of(answer.receipt, Header).points
            name = points.name if points else ""
            if charge.allots and name:
                made[name] = run_id, charge
            elif name:
                ended[name] = ended.get(name, 0) + 1
                made.pop(name, None)
        return made, ended

    def allotment(self, name: str) -> tuple[str, RegionCharge]:
        """Return the run id and the charge of an allotment of the analyst.

        Raises:
            PolicyError: there is none of that name.
        """
        made = self.allotments()
        if name not in made:
            fix = f"{closest(name, made)}; make one by CREATE ALLOTMENT"
            raise PolicyError("allotment", f"{self.analyst} has no allotment {name!r}", fix)
        return made[name]

    def scan(self) -> "Scan":
        """Return the present records; call it only after a charge.

        Raises:
            DpstreamError: there is no table, or its files have changed.
        """
        from dpstream.pipelines.session.records.scan import Scan

        if self.looking:
            raise InvariantError("no record is read where nothing is asked")
        manifest = self.manifest()
        if self._scan is not None:
            # Versions alone do not decide it: they begin again when a table is made again.
            if self._scan.manifest == manifest:
                return self._scan
            self._scan.close()
        self._scan = Scan(self.config.folder, self.table, held=self.held)
        return self._scan

    def close(self) -> None:
        """Close the files, destroy the key ring, save the account's snapshot beside the table."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.ledger.close)
            if "account" in self.__dict__:
                stack.callback(self.account.save)
            if self._ring is not None:
                stack.callback(self._ring.destroy)
            if self._scan is not None:
                stack.callback(self._scan.close)
            self._ring = self._scan = None
