"""A private choice of contributions and bounds as text: its cost and accuracy, then the outcome.

The figures are those that ``--json`` prints: of `tuning.ask.CheckedRequest.describe` and of
`tuning.choose.Outcome`.
"""

from typing import Any

from dpstream.accounting.figures import guarantee_pair, human, up
from dpstream.pipelines.render.layout import count, each, labelled, page


def choice_text(public: dict[str, Any]) -> str:
    """Return cost and expected accuracy of a choice."""
    rule = [*labelled("Rule", f"C is {public['rule']}"), *labelled("Bias", public["bias"])]
    rule = [*labelled("Reads", "records from {} to {}".format(*public["reads"])), *rule]
    if public["how"] == "proxy":
        return page([*labelled("Cost", "none: other data, read without noise"), *rule])
    pair = guarantee_pair(public["epsilon"], public["delta"])
    lines = [
        *labelled(
            "Cost",
            f"{pair}-DP per unit, mu {up(public['mu'], 4)}, charged in the account before the "
            "first draw",
        ),
        *rule,
    ]
    for histogram in public["histograms"]:
        lines += labelled(
            "Accuracy",
            f"{histogram['name']}: {histogram['candidates']} candidates; rank error at most "
            f"{histogram['rank_error_95']:.3g} units (95%): good from "
            f"{histogram['units_for_5_points']:,} units in the first hours, no answer below about "
            f"{histogram['no_answer_below']:,}",
        )
    return page([*lines, *each("Warning", public["warnings"])])


def outcome_text(outcome: dict[str, Any], records: int) -> str:
    """Return what was chosen.

    Args:
        records: of the key whose error is stated.
    """
    bounds = [f"{name}: bounds = {list(pair)}" for name, pair in outcome["bounds"].items()]
    lines = labelled("Chosen", f"contributions = {outcome['contributions']}", *bounds)
    lines += _cut(outcome, records) + each("Note", outcome["notes"])
    if outcome["run_id"]:
        charged = "charged" if outcome["charged"] else "charged before"
        lines += labelled("Run", f"{outcome['run_id']}, {charged}; the receipt is in the account")
    else:
        lines += labelled("Label", "from other data: not charged, shown in every plan")
    lines += labelled("Job", f"{outcome['job']}: `dpstream plan {outcome['job']}`")
    return page([*lines, *labelled("Releases", outcome["releases"])])


def _cut(outcome: dict[str, Any], records: int) -> list[str]:
    """Return what C cuts, how large the noise is, and what a bound per key would do."""
    if outcome["cut"] is None:
        return []
    cut = f"{100 * outcome['cut']:.2g}% of all pairs: what units have beyond C"
    if outcome["run_id"] is None:
        lines = labelled("Cut", f"about {cut}")
    else:
        lines = labelled(
            "Cut",
            f"at least about {cut}; units with very many pairs, too few for the answer's noise, "
            "are not seen",
        )
    if outcome["sd"] is not None:
        sd = human(outcome["sd"])
        lines += labelled(
            "Noise",
            f"±{sd} (sd) at a window's end: a key of {records:,} records is about "
            f"{human(records * outcome['cut'])} short, ±{sd}",
        )
    for other in outcome["per_key"]:
        lines += labelled(
            "Per key",
            f"or per_key_bound = {other['bound']}, contributions = {other['contributions']}: cuts "
            f"about {100 * other['cut']:.2g}%, and what a unit has beyond "
            f"{count(other['bound'], 'record')} of a key; ±{human(other['sd'])}",
        )
    return lines
