"""An execution: the tables of a program, asked by the one sequence of `pipelines.ask`.

The public files are read and checked, and the plan follows, before the charge; records are parsed
behind it.  The files of an answer are kept beside the account, and OUT is made of them: whoever
asks again gets the same bytes, whatever became of OUT or of the records.  Without an account
nothing is kept: OUT is what there is.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.composition import Cost
from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.tabulation.plan import TablePlan
from dpstream.dp_transforms.noise.inputs import combined
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.acceptance import (
    Acceptance,
    given_secret,
    request_for,
    requests_acceptance,
)
from dpstream.pipelines.ask.draft import (
    MANIFEST,
    Manifest,
    decoded,
    manifest_of,
    write_file,
)
from dpstream.pipelines.ask.folder import Archive, Output, archive_of, is_written
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.ask.sequence import ask_uncharged
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.formats.receipt import answered_now, encoded
from dpstream.pipelines.runners.bounded import Runner, run_to_end
from dpstream.pipelines.tabulation.inputs import (
    Inputs,
    Prepared,
    check_records,
    content_of,
    prepared,
    stamps,
)
from dpstream.pipelines.tabulation.private import dead_letter_folder, pieces, read_records
from dpstream.pipelines.tabulation.work import (
    counted,
    counts_digest,
    finished,
    names_of,
    names_of_part,
    pairs_of,
    parts_of,
)
from dpstream.state.disk_errors import file_errors, require_folder
from dpstream.state.durable import make_folder
from dpstream.state.ledger.contract import Answer, Decision
from dpstream.state.ledger.events import Charge, ChargeKind, new_run_id
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import AccountPlace, open_ledger
from dpstream.state.locks import private_folder, sweep
from dpstream.state.private_log import keep_beside


class Order(NamedTuple):
    """The parameters of an execution.

    Attributes:
        inputs: the input files; out: the output folder.
        name: name of the census tables in the project file; empty without a project file.
        secret: where the secret is.
        ledger: the account that is charged; ``None``: no account.
        runner: the runner whose workers do the work; ``None``: this process.  The output does not
            depend on it.
        how: whether the tables are made again at a new charge, and of which state of the data.
        strict: refuse a file with a record that breaks a rule.
        dead_letter: folder of refused records; ``None``: ``dead_letter/`` beside ``out``.
    """

    inputs: Inputs
    out: Path
    secret: SecretSource
    ledger: AccountPlace | None = None
    runner: Runner | None = None
    how: Asking = ONCE
    strict: bool = False
    dead_letter: Path | None = None
    name: str = ""

    @property
    def letters(self) -> Path | None:
        """The folder of refused records; ``None``: they refuse the file."""
        if self.strict:
            return None
        return self.dead_letter or dead_letter_folder(self.out)


class Execution(NamedTuple):
    """The result of an execution.

    Attributes:
        manifest: what stands in OUT.
        charged: by this very call, if a ledger is kept.
        drawn: now; else it was answered before.
    """

    manifest: Manifest
    charged: bool
    drawn: bool


class TablesQuestion:
    """The tables of a plan, for `ask.sequence`.

    Args:
        order: the parameters of the execution.
        setup: plan and domain, from the public files.
        archive: stores the files of the answer.

    Attributes:
        drawn: whether this object has drawn the noise.
    """

    kind: ChargeKind = "table"

    def __init__(self, order: Order, setup: Prepared, archive: Archive) -> None:
        self._order, self._setup, self._archive, self.drawn = order, setup, archive, False

    @property
    def identity(self) -> Sequence[bytes]:
        """The identity as in `ask.question.Question`."""
        return identity_of(self._order.inputs, self._setup.plan)

    def check(self, ring: KeyRing) -> None:
        """Check the records' header, and where files are written.

        The public files were checked when they were read.  The records are looked at here, so that
        nothing tells of them once the question is answered.
        """
        Output(self._order.out, MANIFEST).check(None)
        if self._order.letters is not None:
            require_folder("--dead-letter", self._order.letters)
        check_records(self._order.inputs)
        content_of(self._order.inputs.records)  # readable to the end

    def decide(self, run_id: str, account: History) -> Decision:
        """Decide as in `ask.question.Question`.

        Without an account no cost is needed (an infinite budget has none).
        """
        plan = self._setup.plan
        cost = Cost(0.0, 0.0) if self._order.ledger is None else plan.cost()
        return Decision(charge_of(plan, run_id, cost, self._order.name))

    def stamp(self) -> object:
        """Return the stamp as in `ask.question.Question`."""
        return stamps(self._order.inputs)

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        """Draw as in `ask.question.Question`."""
        order, setup = self._order, self._setup
        with self._archive.draft() as draft:
            draw = _write_in_this_process if order.runner is None else _spread
            draw(order, setup, ring, charge.run_id, draft)
            files = self._archive.seal(draft, names_of(setup))
            insecure = order.secret.insecure_test_secret is not None
            receipt = encoded(manifest_of(setup.plan, answered_now(charge), insecure, files))
            self._archive.keep(draft, receipt)
        self.drawn = True
        return receipt

    def publish(self, receipt: bytes) -> Manifest:
        """Make OUT what a committed receipt says."""
        manifest, take = decoded(receipt), self._archive.take
        output = Output(self._order.out, MANIFEST)
        damaged = output.publish(
            receipt, manifest.files, lambda into, names: take(receipt, manifest.files, names, into)
        )
        for name in damaged:
            print(f"{name} was damaged or missing; it is written again.", file=sys.stderr)
        return manifest


def execute(order: Order, show: Callable[[Execution], object] = lambda _: None) -> Execution:
    """Make the tables.

    Args:
        show: shows what was made; if it fails, making them ``fresh`` again continues this answer.

    Raises:
        DpstreamError: the files have faults, the ledger's limit does not allow it, OUT is another
            execution's, or the input changed while it was read.
    """
    place = order.ledger
    keep_beside(None if place is None else place.path, order.out)
    _check_letters(order)
    if order.runner is not None:
        order.runner.check()
    setup = prepared(order.inputs)
    output, results = Output(order.out, MANIFEST), list[Execution]()
    with contextlib.ExitStack() as stack:
        if place is None:
            results.append(_uncharged(order, setup, output, stack))
            show(results[0])
            return results[0]
        keys = stack.enter_context(order.secret.ring())
        archive = Archive(archive_of(place.path, order.out.parent))
        question = TablesQuestion(order, setup, archive)
        ledger = stack.enter_context(contextlib.closing(open_ledger(place)))

        def deliver(answer: Answer) -> None:
            made = question.publish(answer.receipt)
            results.append(Execution(made, answer.charged, question.drawn))
            show(results[0])

        sequence.ask(question, ledger, keys, order.how, deliver)
    return results[0]


def _uncharged(
    order: Order, setup: Prepared, output: Output, stack: contextlib.ExitStack
) -> Execution:
    """Without an account: what stands in OUT is never drawn again."""
    old_receipt = output.existing_manifest()
    if old_receipt is not None:
        manifest = decoded(old_receipt)
        if manifest.plan_hash != setup.plan.hash:
            raise UsageError("OUT", "exists and is another execution's", "name a new folder")
        if order.how.fresh:
            fix = "omit --fresh to go on with them, or name a new folder: that is a new spend"
            raise UsageError("OUT", "exists, and --fresh keeps the tables that are there", fix)
        with file_errors("OUT", "cannot be read"):
            files = manifest.files.items()
            intact = all(is_written(order.out / name, data) for name, data in files)
        if intact:
            sweep(order.out.parent)
            return Execution(manifest, False, False)
        raise PolicyError(
            "OUT",
            "has a file that is missing or is not what was published",
            "put it away and run again: that is a new spend, which no account adds up",
        )
    make_folder(order.out.parent)
    temporary = stack.enter_context(private_folder(order.out.parent, "OUT"))
    question = TablesQuestion(order, setup, Archive(temporary / "answers", "OUT"))
    with order.secret.ring() as keys:
        receipt = ask_uncharged(question, keys)
    return Execution(question.publish(receipt), False, True)


def _check_letters(order: Order) -> None:
    letters = order.letters
    if letters is None:
        return
    place = letters.resolve()
    if order.out.resolve() in (place, *place.parents):
        raise UsageError(
            "--dead-letter", "lies in OUT, which is published whole", "name a folder elsewhere"
        )
    check_dead_letters(letters, "--dead-letter")


def identity_of(inputs: Inputs, plan: TablePlan) -> list[bytes]:
    """Return the plan, which covers the public files' content, and where the records lie."""
    return [plan.hash.encode(), inputs.place.encode()]


def acceptance(
    inputs: Inputs,
    plan: TablePlan,
    secret: SecretSource | None,
    place: AccountPlace | None,
    how: Asking,
    out: Path | None = None,
) -> Acceptance:
    """Return whether an execution would be charged now, and its cost; charges nothing.

    Args:
        secret: where the secret is; ``None``: there is none, which is a refusal.
        out: the folder that would be made; ``None``: a new one.
    """
    charge = charge_of(plan, new_run_id(), plan.cost())
    if place is None:
        accepted = Acceptance(None, (charge.epsilon, charge.delta), None, None)
        accepted = accepted.unless(lambda: given_secret(secret).check_readable())
    else:
        request = request_for(charge, lambda: identity_of(inputs, plan), secret, how.as_of)
        accepted = requests_acceptance(place, [request], how.fresh)
    if out is None:
        return accepted
    check_dead_letters(dead_letter_folder(out), "--dead-letter")
    return accepted.unless(lambda: Output(out, MANIFEST).check(accepted.run_id))


def charge_of(plan: TablePlan, run_id: str, cost: Cost, label: str = "") -> Charge:
    """Return the charge of a run of a plan for a person, or a household."""
    return Charge(
        run_id,
        plan.hash,
        UnitIdentity(plan.unit, "string").text,
        cost.epsilon,
        cost.delta,
        cost.mu,
        0.0,
        kind="table",
        rho=cost.rho,
        label=label,
    )


def _write_in_this_process(
    order: Order, setup: Prepared, ring: KeyRing, run_id: str, draft: Path
) -> None:
    """Count and draw in this process."""
    tally = counted(setup, read_records(order.inputs.records, setup.lookup, order.letters))
    parts = parts_of(setup)
    inputs = combined(counts_digest(setup, p, pairs_of(setup, tally, p), ring) for p in parts)
    for part in parts:
        for file in finished(setup, part, pairs_of(setup, tally, part), ring, run_id, inputs):
            write_file(draft, file)


def _spread(order: Order, setup: Prepared, ring: KeyRing, run_id: str, draft: Path) -> None:
    """Count and draw on a runner's workers, into the draft folder."""
    from dpstream.pipelines.tabulation.flow import Task, build

    runner, inputs, parts = (
        required(order.runner, "a runner is given"),
        order.inputs,
        parts_of(setup),
    )
    letters = None if order.letters is None else str(order.letters)
    bound = order.secret.of_run(run_id, ring.fingerprint)
    task = Task(inputs, run_id, str(draft), letters, bound)
    # The files of a part are written in this order.
    last = [draft / names_of_part(setup, part)[-1] for part in parts]
    run_to_end(
        runner,
        run_id,
        lambda pipeline: build(pipeline, task, pieces(inputs.records), len(parts)),
        lambda: all(path.exists() for path in last),
    )
