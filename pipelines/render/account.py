"""An account as text: whether a charge would be accepted, what was charged, and what is left.

The figures are those that ``--json`` prints: `ask.acceptance.Acceptance.as_dict`,
`operate.account_view.view`.
"""

import math
from collections.abc import Sequence
from typing import Any

from dpstream.accounting.composition import NAMES
from dpstream.accounting.figures import exact, guarantee_pair, left_text, up
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.render.layout import count, each, labelled, page, table_text

#: Longer labels of charges (many tables) move the rest of their line.
_LABEL = 24
_NO_ACCOUNT = "none: without an account the budgets spent on these data are not added up"


#: Of an answer that was charged before, also where it was cut off then and is given now.
_REPEATED = (
    "The answer that was given before; --fresh asks again at a new charge, --as-of names another "
    "state of the data"
)
INSECURE = "INSECURE: a fixed test secret or run id was used; do not publish."


def place_lines(
    project: str, environment: str | None, data_set: str | None, account: str
) -> list[str]:
    """Return which account a command charges, and which file and environment name it.

    Args:
        project: path of the project file.
        environment: name of the environment; ``None``: none is chosen.
        data_set: name of the data set; ``None``: no account is charged.
        account: path or URL of the account.
    """
    where = "" if environment is None else f", environment {environment}"
    charged = _NO_ACCOUNT if data_set is None else f"{data_set} ({account})"
    return [*labelled("Project", f"{project}{where}"), *labelled("Account", charged)]


def charge_lines(cost: str, charged: bool | None, run_id: str, answered: str = "") -> list[str]:
    """Return what an answer was charged, now or before.

    Args:
        cost: the guarantee and who has it, such as ``(1, 1e-09) per unit``.
        charged: whether this very command was charged; ``None``: there is no account.
        answered: when it was first answered; empty where that is no one moment.
    """
    if charged is None:
        return run_lines(cost, False, run_id)
    if charged:
        return [f"Charged {cost}; run {run_id}"]
    first = f"; first answered {answered}" if answered else f"; run {run_id}"
    return [f"Charged before {cost}{first}", _REPEATED]


def run_lines(cost: str, account: bool, run_id: str) -> list[str]:
    """Return the line about a run's cost, the same for every command that may have charged it.

    Args:
        cost: the guarantee and who has it, such as ``(1, 1e-09) per unit``.
        account: whether the charge is in an account.
    """
    adds = "charged once" if account else "no account adds it up"
    return [f"Costs {cost}, {adds}; run {run_id}"]


def acceptance_lines(
    acceptance: dict[str, Any], verb: str = "Can run", warnings: Sequence[str] = ()
) -> list[str]:
    """Return whether a command would be accepted, then the account and its warnings.

    Args:
        acceptance: `Acceptance.as_dict`.
        verb: of the command, at most 11 characters.
        warnings: about the account's limit.
    """
    account = acceptance["account"]
    lines = accepted_lines(acceptance, verb, account is not None)
    if account is not None:
        lines += labelled("Account", _spending(account))
    elif acceptance["accepted"]:
        lines += labelled("Account", _NO_ACCOUNT)
    return [*lines, *each("Warning", warnings)]


def accepted_lines(acceptance: dict[str, Any], verb: str, account: bool = True) -> list[str]:
    """Return whether a command would be accepted, and its cost; see `acceptance_lines`.

    Args:
        account: whether an account is charged.
    """
    refusal, cost, run_id = (acceptance[name] for name in ("refusal", "charged", "run_id"))
    if refusal is not None:
        return labelled(
            verb, f"NO. {refusal['field']}: {refusal['rule']}", f"Fix: {refusal['fix']}"
        )
    if acceptance["answered"]:
        return labelled(
            verb,
            f"yes: it was answered before (run {run_id}); the same answer is given again, at no "
            "further charge",
        )
    if cost is None:
        run = "" if run_id is None else f"run {run_id} continues, and "
        return labelled(verb, f"yes: {run}nothing more is charged")
    pair = guarantee_pair(cost["epsilon"], cost["delta"])
    spent = "charged before a record is read" if account else "spent"
    return labelled(verb, f"yes: {pair} would be {spent}")


def _spending(account: dict[str, Any]) -> str:
    after, limit, accepting = account["with_this"], account["limit"], account["filter"]
    then, counted = "", account["counted_as"]
    after_this = f"{share_text(after)} after this one" if after is not None else ""
    if counted > 1:
        after_this += f", which counts {counted:,} times"
    if accepting == "first":
        then = "; this one is accepted only by its own guarantee, and every later one is refused"
    elif accepting is not None:
        more = "no more like it" if not account["more"] else f"room for {account['more']:,} like it"
        then = f", {after_this}, then {more} (filter: {NAMES[accepting]})"
    elif after is not None:
        then = f", {after_this}"
    used = f"used {share_text(account['used'])}"
    if account["charges"] and account["used"] == 0 and after is not None:
        used = "in other periods used 0%"
    return (
        f"{account['data_set']}: {count(account['charges'], 'charge')} {used} of epsilon "
        f"{exact(limit['epsilon'])} at delta {exact(limit['delta'])}{then}{_person(account)}"
    )


def _person(figures: dict[str, Any]) -> str:
    """Return what one person has spent over all periods, for an account per period."""
    if figures["period"] is None:
        return ""
    epsilon, delta = figures["person"]
    if math.isinf(epsilon):
        return "; one person over all periods: no bound, because a stream has no end"
    pair = guarantee_pair(epsilon, delta, digits=(4, 4))
    return f"; one person over all periods: {pair}, for charges fixed beforehand"


def share_text(share: float) -> str:
    """Return a share of a limit as a percentage, rounded up."""
    return f"{up(100 * share, 3)}%" if math.isfinite(share) else "more than all"


def view_text(figures: dict[str, Any]) -> str:
    """Return all events of an account, and its sums."""
    lines = [
        *labelled("Account", figures["id"]),
        *labelled("Data set", figures["data_set"]),
        *labelled("Unit", figures["unit"]["text"]),
    ]
    width = min(max(len(entry.get("label", "")) for entry in figures["entries"]), _LABEL)
    for entry in figures["entries"]:
        lines += labelled(f"{entry['seq']:>7}", _event(entry, width))
    lines += labelled("Spent", _spent(figures))
    if figures["limit"] is None:
        lines += labelled("Limit", "none: each record has a budget of its own")
    else:
        lines += _limit(figures["limit"]) + labelled("Left", _left(figures))
    return page([*lines, *each("Warning", figures["warnings"])])


def forecast_text(figures: dict[str, Any]) -> str:
    """Return where a forecast stops, what a person has spent by its end, and its runs.

    Runs of a job that use the same share of the limit are one row.

    Args:
        figures: `operate.forecast.forecast`.
    """
    heads = ("job", "runs", "begin", "end", "charge", "limit used", "one person by their end")
    alike = dict[tuple[str, ...], list[dict[str, Any]]]()
    for run in figures["runs"]:
        charge = "made" if run["charged"] else "expected" if run["accepted"] else "REFUSED"
        used = "–" if run["used"] is None else share_text(run["used"])
        alike.setdefault((run["job"], charge, used), []).append(run)
    rows = [
        (
            job,
            f"{len(runs):,}",
            runs[0]["begins"],
            runs[-1]["ends"] or "–",
            charge,
            used,
            person_text(runs[-1]["person"]),
        )
        for (job, charge, used), runs in alike.items()
    ]
    columns = list(zip(*rows, strict=True)) or [()] * len(heads)
    per = "" if figures["unit"]["period"] is None else f" per {figures['unit']['period']}"
    limit = guarantee_pair(*figures["limit"].values())
    lines = list[str]()
    for job, stop in figures["refused"].items():
        fix = "no epsilon is enough"
        if stop["enough"] is not None:
            epsilon, delta = map(exact, stop["enough"])
            command = f"dpstream account limit {figures['data_set']}"
            fix = f"Fix: `{command} --epsilon {epsilon} --delta {delta}`"
        lines += labelled("Limit ends", f"{job} cannot begin on {stop['begins']}", fix)
    end, most = figures["asked_until"], figures["most_runs"]
    sooner = "" if end == figures["until"] else f", not {end}: a job has {most} runs by then"
    lines += [
        *labelled(
            "Until", f"{figures['until']}{sooner}: one person {person_text(figures['person'])}"
        ),
        *labelled("Data set", f"{figures['data_set']}, unit {figures['unit']['text']}"),
        *labelled("Limit", f"{limit} per unit{per}"),
    ]
    if figures["other_charges"]:
        lines += labelled("Also", count(figures["other_charges"], "charge") + " of questions")
    aligned = (False, True, False, False, False, True, False)
    return f"{page(lines)}\n{table_text(heads, columns, aligned)}"


def person_text(person: Sequence[float]) -> str:
    """Return what one person has spent."""
    if math.isinf(person[0]):
        return "no bound"
    return guarantee_pair(person[0], person[1], digits=(4, 4))


def _left(figures: dict[str, Any]) -> str:
    """Return what is left for one more charge of the account's unit."""
    twice = "; a question about all records counts 2 times" if figures["period"] else ""
    return left_text(figures["left"]) + twice


def _spent(figures: dict[str, Any]) -> str:
    """Return the share of the limit that is used, then what charges fixed beforehand promise."""
    spent, delta = figures["spent"]["epsilon"], up(figures["spent"]["delta"])
    epsilon = "more than any epsilon" if spent is None else f"epsilon {up(spent)}"
    per = "unit" if figures.get("period") is None else f"unit and {figures['period']}"
    promise = f"{epsilon} at delta {delta} per {per}, for charges fixed beforehand"
    if figures.get("used") is None:
        return promise
    return f"{share_text(figures['used'])} of the limit; {promise}{_person(figures)}"


def _limit(limit: dict[str, float]) -> list[str]:
    return labelled("Limit", f"epsilon {exact(limit['epsilon'])} at delta {exact(limit['delta'])}")


def _event(entry: dict[str, Any], width: int) -> str:
    """Return one event as text; names of jobs and tables take ``width`` characters."""
    match entry["event"]:
        case "charge":
            label = f"{entry['label']:<{width}}  " if width else ""
            epoch = f" epoch {entry['epoch']}" if entry["epoch"] else ""
            noise = "".join(
                f", {name} {up(entry[name], 4)}"
                for name in ("mu", "rho")
                if entry[name] is not None
            )
            return (
                f"{entry['kind']:<8} {label}{entry['run_id']}{epoch}  {entry['at'] or '–'}  "
                f"{guarantee_pair(entry['epsilon'], entry['delta'])}{noise}{_counted(entry)}"
            )
        case "receipt":
            return f"answered {entry['run_id']}"
        case "created" | "limit":
            what = "created " if entry["event"] == "created" else "limit   "
            limit = entry["limit"]
            if limit is None:
                return what.rstrip()
            return f"{what} limit epsilon {exact(limit[0])}, delta {exact(limit[1])}"
        case "closed":
            return f"closed   {', '.join(entry['run_ids'])}"
        case "widened":
            return f"widened  table model {entry['old']} into {entry['new']}"
        case _:
            return f"table    {entry['id']}"


def _counted(entry: dict[str, Any]) -> str:
    """Return how many units an entry counts as, as text, if that is not one."""
    if entry["counted_as"] == 1:
        return ""
    unit = UnitIdentity.read(entry["identity"])
    return f", counted {entry['counted_as']:,} times: {unit.description}"
