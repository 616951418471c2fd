"""An audit as a page of text and as a picture of the trade-off curve it measured."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import norm

from dpstream.accounting.errors import RunError
from dpstream.accounting.evidence.bounds import claimed_curve, trade_off
from dpstream.accounting.figures import down, up
from dpstream.pipelines.audit.audit import AuditResult, visible_epsilon

mpl.use("Agg")
_CLAIM, _SEEN, _MEASURED, _PROVEN = "#4a4a4a", "#1f5fa8", "#c2571a", "#2f8f5b"


def text(result: AuditResult) -> str:
    """For a person at a terminal."""
    claim, best = result.claim, result.best.bound
    percent = f"{100 * result.ask.confidence:g}%"
    lines = [
        f"Claim       epsilon {up(claim.epsilon, 4)} at delta {up(claim.delta, 3)}: "
        f"mu {up(claim.mu, 4)}, thresholds C b = {up(claim.slack, 3)}",
        f"Visible     at best mu {down(result.visible, 4)} (epsilon "
        f"{down(visible_epsilon(result, result.visible), 4)}) to an observer of the keys of "
        "one unit",
        f"Proven      epsilon >= {down(best.epsilon, 4)}, mu >= {down(best.mu, 4)} with "
        f"confidence {percent}",
        "",
        "Trials        visible mu   proven mu   proven epsilon   trials a side   the unit's",
    ]
    for f in result.families:
        lines.append(
            f"{f.name:<12}  {down(f.visible, 4):<11}  {down(f.bound.mu, 4):<10}  "
            f"{down(f.bound.epsilon, 4):<15}  {f.bound.trials[1]:<14,}  {f.description}"
        )
    if result.alone is not None:
        alone = result.alone
        lines.append(
            f"alone         {alone.released:,} of {alone.keys:,} keys of {alone.units} unit(s) "
            f"released: chance >= {down(alone.at_least, 3)}, claimed <= {up(claim.tail, 3)}"
        )
    lines += ["", f"Seconds     {result.seconds:.1f}"]
    if result.refuted:
        why = [f.name for f in result.families if f.bound.refutes(claim)]
        if result.alone is not None and result.alone.at_least > claim.tail:
            why.append("alone")
        lines.append(
            f"Verdict     REFUTED by {', '.join(why)}: the mechanism that ran is not what the plan "
            "claims; publish nothing of it"
        )
    else:
        lines.append("Verdict     consistent: no bound exceeds the claim")
    return "\n".join(lines) + "\n"


def picture(result: AuditResult) -> Figure:
    """Empirical trade-off of the best family against the claim."""
    family, claim = result.best, result.claim
    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.subplots()
    grid = np.concatenate([np.geomspace(1e-6, 0.01, 100), np.linspace(0.01, 1, 400)])
    least = claimed_curve(claim, grid)
    axes.fill_between(grid, 0, least, color=_CLAIM, alpha=0.12, linewidth=0)
    claimed = f"claim: nothing may lie below (mu {up(claim.mu, 3)})"
    axes.plot(grid, least, color=_CLAIM, lw=1.6, label=claimed)
    seen = norm.cdf(norm.isf(grid) - family.visible)
    axes.plot(
        grid,
        seen,
        color=_SEEN,
        lw=1.2,
        ls="--",
        label=f"visible to this test (mu {down(family.visible, 3)})",
    )
    axes.plot(*trade_off(family.scores), color=_MEASURED, lw=1.6, label="measured")
    proven = norm.cdf(norm.isf(grid) - family.bound.mu)
    label = f"proven (mu {down(family.bound.mu, 3)})"
    axes.plot(grid, proven, color=_PROVEN, lw=1.2, ls=":", label=label)
    at = (family.bound.false_positives, family.bound.false_negatives)
    axes.plot(*at, "o", color=_PROVEN, ms=6, label="bounds of the cutoff that was counted")
    axes.set(
        xlim=(0, 1), ylim=(0, 1), xlabel="false positives", ylabel="false negatives", aspect="equal"
    )
    axes.set_title(
        f"{'REFUTED' if result.refuted else 'consistent'}: epsilon >= "
        f"{down(family.bound.epsilon, 3)} proven, {up(claim.epsilon, 3)} claimed ({family.name})",
        fontsize=10,
        loc="left",
    )
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.grid(alpha=0.25, lw=0.5)
    return figure


def draw(result: AuditResult, out: Path) -> None:
    """Write the picture.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        picture(result).savefig(out, dpi=150)
    except (OSError, ValueError):
        raise RunError("--picture", "cannot be written", "check folder and ending") from None
