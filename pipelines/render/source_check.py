"""The result of ``dpstream check`` as text, for the operator alone: usable records and faults."""

from typing import Any

from dpstream.pipelines.render.layout import count, labelled, page


def check_text(checked: dict[str, Any], job: str) -> str:
    """Return the counts of a source's records, with the first position and the fix of each fault.

    Args:
        checked: `operate.check.Checked` as values for JSON; PRIVATE.
        job: the job and the options that name it, as they are typed.
    """
    part = "all of the source" if checked["complete"] else "the first ones only (--limit)"
    lines = labelled("Read", f"{count(checked['read'], 'row')}, {part}")
    if checked["left_out"]:
        lines += labelled("Left out", f"{checked['left_out']:,} by query")
    unusable = sum(fault["records"] for fault in checked["unusable"])
    share = 100 * unusable / max(1, checked["usable"] + unusable)
    lines += labelled("Usable", count(checked["usable"], "record"))
    lines += labelled("Unusable", f"{count(unusable, 'record')} ({share:.3g}%)")
    for fault in checked["unusable"]:
        lines += _fault(fault)
    if checked["beyond_contributions"]:
        lines += labelled(
            "Not counted",
            f"{checked['beyond_contributions']:,} contributions beyond the bound of their unit "
            "(contributions): a larger bound counts more of them, with more noise",
        )
    lines += _appears(checked)
    if checked["usable"] == 0:
        lines.append(
            "No record is usable: `dpstream run` would charge its budget and release nothing."
        )
    else:
        lines.append(f"Nothing was charged or stored. Next: `dpstream plan {job}`.")
    return page(lines)


def _fault(fault: dict[str, Any]) -> list[str]:
    where = "; ".join(f"{name}, row {row:,}" for name, row in fault["first"])
    lines = [
        f"  {fault['records']:,} with the reason {fault['reason']}: {fault['problem']}",
        f"    first at {where} (rows are counted from 0, without header and blank lines)",
    ]
    fix = fault["fix"]
    if fault["no_time"]:
        lines.append(f"    no time that can be read: {fault['no_time']:,} of them")
        fix = (
            "say in the table how its times are written, e.g. time_column = { column = 'NAME', "
            "format = '%d.%m.%Y %H:%M' }, or unit = 's' since 1970; or write them as "
            f"2024-01-31T13:05:00Z (RFC 3339); or {fix}"
        )
    return [*lines, f"    Fix: {fix}."]


def _appears(checked: dict[str, Any]) -> list[str]:
    """Return whether a key has enough units; nothing if keys are public or no record is usable."""
    needed, most = checked["units_needed"], checked["most_units_up_to_needed"]
    if needed is None or not checked["usable"]:
        return []
    chance = f"{count(needed, 'unit')} of one window, enough for a 50% chance of being published"
    if most is None:
        return labelled("Appears", f"not counted: too many keys to tell whether one has {chance}")
    if most >= needed:
        return labelled("Appears", f"yes: a key has {chance}")
    among = "" if checked["complete"] else ", among the rows read"
    return labelled(
        "Appears",
        f"nothing is likely: no key has {chance}; the most is {most:,}{among}",
        "Fix: take longer windows, fewer key columns, a larger epsilon, or name the keys in "
        "public_keys.",
    )
