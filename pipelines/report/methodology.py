"""The methodology of a job's figures in plain language, as a page and a text file show it.

It is a function of public parameters alone: the plan, the figures of its guarantee, and how the
job presents its figures.  A reader needs neither statistics nor this program's words.

**The attacker.**  For neighbours, a test that is wrong with probability a where a unit has no
records is right with probability at most e^epsilon a + delta and 1 - e^-epsilon (1 - a - delta)
where it has some; of Gaussian noise mu beside thresholds that fail with at most delta, with at most
Phi(Phi^-1(a) + mu) + delta (Dong, Roth and Su 2022).  The least of them is stated.
"""

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

from dpstream.accounting.errors import required
from dpstream.accounting.figures import human, human_up
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.project.job_section import PublicationSection
from dpstream.pipelines.report.text import label_of

#: A heading and its paragraphs.
Part = tuple[str, list[str]]
#: Of 100 units without records, so many are named wrongly.
_WRONG = 0.01
#: If an attacker can rightly name so many of 100, the promise is called weak.
_WEAK = 90
#: Lengths that have a name.
_NAMES = {"7 days": "week"}
_SURE = (
    "The number after ± says how far the noise may have moved a figure: 100 ± 20 means that "
    "without the noise the figure would lie between 80 and 120, in 95 of 100 such cases. It is "
    "1.96 standard deviations (sd) of the noise. It does not cover what the figures leave out.",
    "The noise can make a figure negative, or make parts add up to more than their total.",
)
_COMPARE = (
    "To get the ± of a difference, square the two numbers after ±, add the squares, and take the "
    "square root. 130 ± 15 and 100 ± 20 differ by 30 ± 25: the first is larger, because 30 is more "
    "than 25. 110 ± 15 and 100 ± 20 differ by 10 ± 25: these figures do not show which is larger. "
    "The ± of a sum is the same. Of 100 comparisons of equal things, about 5 differ by more than "
    "their ±.",
)


def length_name(plan: Plan, length: int) -> str:
    """Return a length of a plan's time axis after "a" or "each": ``week``, ``period of 3 days``."""
    words = plan.timeline.words(length)
    number, _, unit = words.partition(" ")
    return _NAMES.get(words) or (unit if number == "1" else f"period of {words}")


def several(length: str) -> str:
    """Return what `length_name` returns after a number: ``weeks``, ``periods of 3 days``."""
    return length.replace("period", "periods", 1) if " " in length else f"{length}s"


def methodology(
    plan: Plan, figures: dict[str, Any], publication: PublicationSection
) -> Iterator[Part]:
    """Yield what a reader of the figures must know: each heading with its paragraphs.

    Args:
        figures: `accounting.guarantee.describe` of the plan.
        publication: how the figures are presented; see `report.text.publication_of`.
    """
    yield "Who is protected", [*protection(plan, figures, publication)]
    yield "What the figures leave out", [*left_out(plan, figures, publication)]
    yield "How sure a figure is", [*_SURE]
    timeline = plan.timeline
    several_windows = several(length_name(plan, timeline.window))
    apart = " that do not overlap" * (timeline.slide < timeline.window)
    which = f"Compare figures of one column: those of two rows, or of two {several_windows}{apart}."
    yield "How to compare two figures", [*_COMPARE, which]
    yield "How to cite", [*_citation(plan, figures, publication)]


def cost_text(plan: Plan, figures: dict[str, Any], publication: PublicationSection) -> str:
    """Return the cost for one unit in one line: of one period, and of all of them."""
    first, *more = figures["periods"] or [figures["guarantee"]]
    unit = label_of(plan.unit.column, publication)
    if plan.timeline.period is None:
        return f"epsilon {human_up(first['epsilon'])} for one {unit}"
    lifetime = "".join(f", {human_up(r['epsilon'])} {_all_periods(plan, r)}" for r in more[-1:])
    return f"epsilon {human_up(first['epsilon'])} for one {unit} in one {_period(plan)}{lifetime}"


def _period(plan: Plan) -> str:
    return length_name(plan, required(plan.timeline.period, "budget.covers is a length"))


def _all_periods(plan: Plan, last: dict[str, float]) -> str:
    """``in all 52 weeks``; of a stream without end so many as its figures are stated for."""
    every, count = "all " * (plan.timeline.periods is not None), f"{last['periods']:,}"
    return f"in {every}{count} {several(_period(plan))}"


def protection(
    plan: Plan, figures: dict[str, Any], publication: PublicationSection
) -> Iterator[str]:
    """Yield the promise in words: for one period, then for all of them."""
    unit, lasting = label_of(plan.unit.column, publication), plan.timeline.period is None
    if not figures["guarantee"]["sound"]:
        yield "Nobody is protected as stated: the guarantee of this mechanism does NOT hold."
        return
    records = f"the records of one {unit}" + ("" if lasting else f" in one {_period(plan)}")
    yield (
        f"Random noise was added to all figures, so that they hardly show whether {records} are "
        "among the data. This holds even for someone who knows all other records. The method is "
        "called differential privacy."
    )
    first, *more = figures["periods"]
    yield f"The promise for {records}: {_promise(first)}. Smaller numbers protect more."
    if lasting:
        yield f"It covers everything that is published, about all records of one {unit}."
    elif more:
        yield (
            f"The figures of several {several(_period(plan))} together tell more about whoever has "
            f"records in all of them. For one {unit} with records {_all_periods(plan, more[-1])}: "
            f"{_promise(more[-1])}."
        )
        if plan.timeline.periods is None:
            yield f"The series has no fixed end: epsilon grows with each further {_period(plan)}."
    else:
        yield (
            f"It covers one {_period(plan)}. If figures of further {several(_period(plan))} are "
            "published, all of them together tell more about whoever has records in several."
        )


def _promise(row: dict[str, float]) -> str:
    """Return one guarantee with what it means for an attacker, in numbers of 100."""
    rightly = named_rightly(row["epsilon"], row["delta"], row["mu"] or None)
    pair = f"epsilon {human_up(row['epsilon'])} and delta {human_up(row['delta'])}"
    if rightly >= 100:
        return (
            f"{pair}. That is weak: an attacker may be able to name nearly all of those in the data"
        )
    weak = "That is weak. " * (rightly >= _WEAK)
    return (
        f"{pair}. {weak}Suppose that an attacker guesses from the figures who is in the data. "
        "If the attacker wrongly names 1 of 100 who are not in the data, then the attacker rightly "
        f"names at most {rightly} of 100 who are"
    )


def named_rightly(epsilon: float, delta: float, mu: float | None) -> int:
    """Return how many of 100 units in the data an attacker can name at most; see the module.

    Args:
        mu: of Gaussian noise; ``None``: epsilon alone is promised.
    """
    bounds = [1.0, 1 - math.exp(-epsilon) * (1 - _WRONG - delta)]
    if epsilon < math.log(1 / _WRONG):
        bounds.append(math.exp(epsilon) * _WRONG + delta)
    if mu is not None:
        normal = NormalDist()
        bounds.append(normal.cdf(normal.inv_cdf(_WRONG) + mu) + delta)
    return math.ceil(100 * min(bounds) + 1e-6)


def left_out(plan: Plan, figures: dict[str, Any], publication: PublicationSection) -> Iterator[str]:
    """Yield what is not in the figures, which ± does not cover."""
    timeline, privacy = plan.timeline, plan.privacy
    unit, window = label_of(plan.unit.column, publication), length_name(plan, timeline.window)
    lasting = timeline.period
    span = "over the whole time" if lasting is None else f"in a {length_name(plan, lasting)}"
    row = (
        ""
        if privacy.per_key_bound is None
        else f", at most {privacy.per_key_bound:,} of them in one row of the table"
    )
    yield (
        f"At most {privacy.contributions:,} records of one {unit} count {span}{row}. Further "
        "records are left out, so that figures are too low where there are more"
        + (f", and may fall from one {window} to the next." if lasting is None else ".")
    )
    if figures["selection"] is None:
        yield (
            "Which rows are published was fixed beforehand. A row without records has a figure "
            "too, which is noise alone."
        )
    else:
        least = figures["selection"]["units_for_half_chance_easiest"]
        again = f" Once published, it stays in every later {window}, also with smaller figures."
        yield (
            "To protect those who are in rows with few others, a row is published only if its "
            f"count, with each {unit} counted once, is about {least:,} or more in a {window}. A "
            "missing row does not mean zero."
            + again
            * (plan.design.remembers and not isinstance(plan.remember, int))
        )
    for aggregate in plan.aggregates:
        if aggregate.bounds is not None:
            low, high = (human(bound) for bound in aggregate.bounds)
            yield (
                f"{label_of(aggregate.name, publication)}: a value below {low} in one record "
                f"counts as {low}, and one above {high} counts as {high}."
            )
    if plan.stamp != "event_time":
        late = timeline.allowed_lateness
        wait = f"more than {timeline.words(late)} " * (late > 0)
        yield f"Records that became known {wait}after the end of a {window} are left out."
    else:
        yield f"Records that became known after their {window} was published are left out."
    share = publication.uncertain_above
    if share is not None:
        yield withheld_text(share)


def withheld_text(share: float) -> str:
    """Return what is shown as too uncertain, and what follows for the others."""
    return (
        "A figure is shown as “too uncertain” if the standard deviation of its noise is above "
        f"{100 * share:.0f}% of the figure, or if the figure is zero or negative. “Too "
        "uncertain” does not mean zero. Noise that lowers a figure may hide it, and noise that "
        "raises a figure may show it: therefore the figures that are shown are too high on "
        "average, small ones most. The downloads have all figures, with a mark."
    )


def _citation(
    plan: Plan, figures: dict[str, Any], publication: PublicationSection
) -> Iterator[str]:
    """Yield how the figures may be used and are cited."""
    if publication.licence:
        yield f"The figures may be used under the licence {publication.licence}."
    named = ", ".join(text for text in (publication.publisher, publication.title) if text)
    cited = publication.citation or named
    guarantee = figures["guarantee"]
    yield (
        f"{cited.rstrip('.')}. Differentially private, epsilon {human_up(guarantee['epsilon'])}, "
        f"delta {human_up(guarantee['delta'])}; plan {figures['plan_hash'][:16]}."
    )
    yield f"Give each figure with its ±, and name its {length_name(plan, plan.timeline.window)}."
