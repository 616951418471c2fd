"""Lines below an answer: what its intervals cover, and estimates of what its bounds leave out."""

from dpstream.accounting.figures import human
from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.sql.receipt import Header

INTERVALS = "The 95% intervals cover the noise only, not what the bounds cut."
#: After the share of values beyond the bounds of a variance, for which sizes do not add up.
_SQUARED = (
    ", each of which is counted as the bound; a variance weighs the squares of distances, so that a"
    " few far values can make most of it: it may be much too small"
)


def lines_of(header: Header, unit: str, group: str, intervals: bool = True) -> list[str]:
    """Return a line for each chosen bound, with the estimate of its cut, and one for the others.

    Args:
        unit: the name of the privacy unit.
        group: the name of a group; empty without groups.
        intervals: whether the answer has intervals.
    """
    lines = [INTERVALS] * intervals
    lines += [_line(name, cut, unit, group) for name, cut in header.cuts.items()]
    if header.not_estimated:
        given = ", ".join(header.not_estimated)
        lines.append(f"Not estimated: what the given bounds cut ({given}).")
    return lines


def _line(name: str, cut: Cut, unit: str, group: str) -> str:
    within = f"(to within {_share(cut.within)} of them, at 95%)"
    if cut.of == "values":
        head = f"Bounds of {name}, chosen privately: {human(cut.low)} to {human(cut.high)}"
        beyond = (
            f"about {_share(cut.below)} of values are below, {_share(cut.above)} above {within}"
        )
        return f"{head}; {beyond}{_amount(cut, 'their size') or _SQUARED}."
    if cut.of == "bounds":
        each, times = f" in a {group}" * bool(group), f"{human(cut.high)} times " * (cut.high != 1)
        head = f"The sum of one {unit}{each} counts up to {times}the given bounds"
        of = f"sums in one random {group} of each {unit}" if group else f"sums of one {unit}"
        beyond = f"about {_share(cut.above)} of {of} are larger {within}"
        return f"{head}, chosen privately; {beyond}{_amount(cut, 'their size')}."
    rows = f"of one {unit}" + f" in a {group}" * bool(group and cut.of == "rows")
    many = "s" * (cut.high != 1)
    what = f"{group if cut.of == 'groups' else 'row'}{many} {rows}"
    head = f"At most {human(cut.high)} {what} count{'' if many else 's'}, chosen privately"
    of = f"pairs of {unit} and {group}" if cut.of == "groups" else "rows"
    if cut.of == "rows" and group:  # what the histogram holds: units of many groups weigh no more
        of = f"rows in one random {group} of each {unit}"
    return f"{head}; about {_share(cut.above)} have more {within}{_amount(cut, f'all {of}')}."


def _amount(cut: Cut, of: str) -> str:
    """Return the share of the amount that is cut, after the share of the number."""
    if cut.amount is None or cut.amount_at_most is None:
        return ""
    most = f"up to {_share(cut.amount_at_most)} if the largest fall as slowly as a power law"
    return f", and about {_share(cut.amount)} of {of} is cut ({most})"


def _share(part: float) -> str:
    """Return a share as a percentage with two digits, no finer than a hundredth."""
    return "0%" if part < 5e-5 else "100%" if part >= 0.995 else f"{100 * part:.2g}%"
