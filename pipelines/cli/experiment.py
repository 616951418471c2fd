"""``dpstream experiment``: the papers' tables and figures."""

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.parts import AS_JSON, ListCommand, examples, options, print_json
from dpstream.pipelines.experiments.modes import NAMED

BASELINES = ("baseline1", "baseline2", "baseline1+published", "baseline2+published")
LINEAR = ("example4", "table2", "figure3", "figure4", "figure5")
_SIZE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)
MODES = click.option(
    "--modes",
    multiple=True,
    default=("sticky", "combined", "tree", "rounds", "paper"),
    show_default=True,
    help=f"Settings of [privacy]: {', '.join(NAMED)}, NAME,key=value or key=value.",
)
WITH_BASELINES = click.option(
    "--baselines",
    multiple=True,
    type=click.Choice((*BASELINES, "none")),
    default=BASELINES,
    show_default=True,
    help="One-shot DP, repeated (1) or on new data only (2); +published: as the paper composed it.",
)
TRIGGERS = click.option(
    "--triggers", multiple=True, type=_SIZE, default=(100, 1000), show_default=True, help="Every T."
)
COMMON = options(
    click.option(
        "--seed", default=0, show_default=True, help="Of the data; noise is always fresh."
    ),
    click.option("--epsilon", default=6.0, show_default=True),
    click.option("--delta", default=1e-9, show_default=True),
    click.option("--shards", type=_SIZE, default=4, show_default=True, help="Key shards of a run."),
    click.option("--folder", type=_FILE, help="Keep data and runs here.  [default: kept nowhere]"),
    click.option(
        "--out", type=_FILE, help="FILE.json, replaced if it exists; pictures go beside it."
    ),
    AS_JSON,
)


@click.group()
def experiment() -> None:
    """Repeat the papers' experiments: every mode through the real pipeline, against the truth."""


@experiment.command(
    cls=ListCommand,
    epilog=examples(
        "dpstream experiment table1 --out runs/table1.json",
        "dpstream experiment table1 --users 1000000 --triggers 100 --modes sticky paper",
        "dpstream experiment table1 --modes sticky sticky,selection_share=0.8 --baselines none",
        "dpstream experiment table1 --users 10000000 --folder runs   # the paper's size",
    ),
)
@click.option("--users", type=_SIZE, default=200_000, show_default=True, help="5.9 records each.")
@click.option("--keys", type=_SIZE, default=1_000_000, show_default=True)
@TRIGGERS
@click.option("--contributions", type=_SIZE, default=32, show_default=True, help="C.")
@MODES
@WITH_BASELINES
@COMMON
def table1(**asked: Any) -> None:
    """Table 1: keys and errors of modes and baselines on the synthetic day."""
    from dpstream.pipelines.experiments import studies

    _run("table1", studies.table1, **asked)


@experiment.command(
    cls=ListCommand,
    epilog=examples(
        "dpstream experiment figure10 --out runs/figure10.json",
        "dpstream experiment figure10 --users 1000000 --contributions 1 5 25 --modes sticky",
    ),
)
@click.option("--users", type=_SIZE, default=200_000, show_default=True, help="5.9 records each.")
@click.option("--keys", type=_SIZE, default=1_000_000, show_default=True)
@click.option(
    "--triggers", type=_SIZE, default=100, show_default=True, help="T, of all runs alike."
)
@click.option(
    "--contributions",
    multiple=True,
    type=_SIZE,
    default=(1, 2, 5, 10, 15, 20, 25, 30, 40, 50),
    show_default=True,
    help="Every C.",
)
@MODES
@COMMON
def figure10(**asked: Any) -> None:
    """Figure 10: keys and errors against C."""
    from dpstream.pipelines.experiments import studies

    _run("figure10", studies.figure10, baselines=("none",), **asked)


@experiment.command(
    cls=ListCommand,
    epilog=examples(
        "dpstream experiment table2 --out runs/table2.json",
        "dpstream experiment table2 --users 100000 --triggers 100",
        "dpstream experiment table2 --webis corpus-webis-tldr-17.zip --folder runs",
    ),
)
@click.option("--users", type=_SIZE, default=1_400_000, show_default=True, help="2.7 posts each.")
@click.option("--webis", type=_FILE, help="The real corpus, JSON Lines or its zip.")
@TRIGGERS
@click.option("--contributions", type=_SIZE, default=17, show_default=True, help="C.")
@MODES
@WITH_BASELINES
@COMMON
def table2(**asked: Any) -> None:
    """Table 2: posts by subreddit, generated like Webis-TLDR-17 or the real corpus."""
    from dpstream.pipelines.experiments import studies

    _run("table2", studies.table2, **asked)


@experiment.command(
    cls=ListCommand,
    epilog=examples(
        "dpstream experiment workloads --out runs/workloads.json",
        "dpstream experiment workloads --only example4 table2 --json",
        "dpstream experiment workloads --cells 256 --large 1024",
    ),
)
@click.option("--only", multiple=True, type=click.Choice(LINEAR), default=LINEAR,
              show_default=True, help="Parts.")  # fmt: skip
@click.option("--cells", type=_SIZE, default=2048, show_default=True, help="A power of 2.")
@click.option("--large", type=_SIZE, default=8192, show_default=True, help="The same, of figure4.")
@click.option("--seed", default=0, show_default=True, help="Of queries and tables.")
@click.option("--epsilon", default=0.5, show_default=True)
@click.option("--delta", default=1e-4, show_default=True)
@click.option("--out", type=_FILE, help="FILE.json, replaced if it exists; pictures beside it.")
@AS_JSON
def workloads(
    only: tuple[str, ...], out: Path | None, as_json: bool, **asked: Any
) -> None:  # fmt: skip
    """Linear workloads: Example 4, Table 2 and Figures 3 to 5 of the eigen-design paper."""
    _check_out(out)
    from dpstream.pipelines.experiments import charts, linear, linear_charts
    from dpstream.pipelines.experiments.runs import provenance, save

    study = linear.Study(**asked).check()
    parts = {name: linear.PARTS[name](study, _say) for name in dict.fromkeys(only)}
    command = " ".join(["dpstream", "experiment", "workloads", *_flags({"only": only, **asked})])
    result = {"experiment": "workloads", **provenance(), **asked, "command": command, **parts}
    if out is not None:
        save(result, out)
        names = []
        for name, rows in parts.items():
            figure = linear_charts.CHARTS[name](rows)
            names += charts.draw(figure, out.with_name(f"{out.stem}-{name}.json"))
        result["pictures"] = names
        _say(f"wrote {out} and {', '.join(names)}")
    if as_json:
        print_json(result)
    else:
        for name, rows in parts.items():
            click.echo(f"{name}\n{linear.words(rows)}")


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix != ".json":
        raise UsageError("--out", "must end in .json", "write FILE.json")


def _run(
    name: str,
    study: Callable[..., Any],
    *,
    folder: Path | None,
    out: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Run a study; print a table or JSON; write JSON and pictures if asked to."""
    _check_out(out)
    from dpstream.pipelines.experiments import charts
    from dpstream.pipelines.experiments.runs import save
    from dpstream.pipelines.experiments.studies import Study

    asked |= {k: (asked[k],) for k in ("triggers", "contributions") if isinstance(asked[k], int)}
    asked["baselines"] = tuple(b for b in asked["baselines"] if b != "none")
    command = " ".join(["dpstream", "experiment", name, *_flags(asked)])
    with ExitStack() as stack:
        kept = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out = out or (folder and folder / f"{name}.json")
        result, figure = study(Study(folder=kept, notes={"command": command}, **asked), _say)
    if out is not None:
        save(result, out)
        result["pictures"] = charts.draw(figure, out)
        _say(f"wrote {out} and {', '.join(result['pictures'])}")
    if as_json:
        print_json(result)
    else:
        _print(result)


def _flags(asked: dict[str, Any]) -> list[str]:
    """The parameters as flags again, defaults included."""
    flags = []
    for name, value in asked.items():
        if value is not None:
            values = value if isinstance(value, tuple) else (value,)
            flags += [f"--{name}", *(map(str, values) if values else ["none"])]
    return flags


def _say(text: str) -> None:
    click.echo(text, err=True)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("T", "C", "method", title=f"{result['experiment']}, {result['users']:,} users")
    for name in ("keys", "L1", "L2", "Linf", "mean L1", "updates", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(result["runs"], key=lambda r: (r["triggers"], r["contributions"])):
        figures = (row[k] for k in ("keys", "l1", "l2", "linf", "l1_average", "updates"))
        where = (str(row["triggers"]), str(row["contributions"]), row["method"])
        table.add_row(*where, *(f"{f:,.0f}" for f in figures), f"{row['seconds']:.1f}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(table)
