"""The papers' tables and figures: ``python -m tests.bench.paper``, ``make paper``."""

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.main import Coded, silence
from dpstream.pipelines.cli.parts import AS_JSON, examples, options, print_json
from tests.bench.paper.jobs import NAMED

BASELINES = ("paper", "baseline1", "baseline2", "baseline1+published", "baseline2+published")
LINEAR = ("example4", "table2", "figure3", "figure4", "figure5")
_COMMAND = ("python", "-m", "tests.bench.paper")
_SIZE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)
MODES = click.option(
    "--modes",
    multiple=True,
    default=("sticky", "combined", "tree"),
    show_default=True,
    help=f"Settings of the mechanism: {', '.join(NAMED)}, NAME,key=value or key=value.",
)
WITH_BASELINES = click.option(
    "--baselines",
    multiple=True,
    type=click.Choice((*BASELINES, "none")),
    default=BASELINES,
    show_default=True,
    help="paper: its Algorithm 2 as published, simulated. One-shot DP, repeated (1) or on new data "
    "only (2); +published: as the paper composed it.",
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
    click.option("--out", type=_FILE, help="FILE.json, replaced if it exists."),
    AS_JSON,
)


class ListCommand(click.Command):
    """A command without arguments whose repeatable options take several values at once:
    ``--triggers 100 1000`` is ``--triggers 100 --triggers 1000``."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        lists = {
            flag
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for flag in option.opts
        }
        spread, flag, values = list[str](), "", 0
        for arg in [*args, "--"]:
            if arg.startswith("--"):
                if flag and not values:
                    spread.append(flag)  # click says that it needs a value
                flag, values = (arg, 0) if arg in lists else ("", 0)
                spread += [arg] if not flag and arg != "--" else []
            else:
                spread += [flag, arg] if flag else [arg]
                values += 1
        return super().parse_args(ctx, spread)


@click.group(cls=Coded, context_settings={"help_option_names": ["-h", "--help"]})
def paper() -> None:
    """Repeat the papers' experiments: every mode through the real pipeline, against the truth."""


@paper.command(
    cls=ListCommand,
    epilog=examples(
        "python -m tests.bench.paper table1 --out runs/table1.json",
        "python -m tests.bench.paper table1 --users 1000000 --triggers 100 --modes sticky",
        "python -m tests.bench.paper table1 --modes sticky,combine=true --baselines none",
        "python -m tests.bench.paper table1 --users 10000000 --folder runs   # the paper's size",
    ),
)
@click.option("--users", type=_SIZE, default=200_000, show_default=True, help="5.9 records each.")
@click.option("--keys", type=_SIZE, default=1_000_000, show_default=True)
@TRIGGERS
@click.option("--contributions", type=_SIZE, default=32, show_default=True, help="C.")
@MODES
@WITH_BASELINES
@COMMON
def table1(**arguments: Any) -> None:
    """Table 1: keys and errors of modes and baselines on the synthetic day."""
    from tests.bench.paper import studies

    _run("table1", studies.synthetic_day, **arguments)


@paper.command(
    cls=ListCommand,
    epilog=examples(
        "python -m tests.bench.paper figure10 --out runs/figure10.json",
        "python -m tests.bench.paper figure10 --users 1000000 --contributions 5 25 --modes sticky",
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
def figure10(**arguments: Any) -> None:
    """Figure 10: keys and errors against C."""
    from tests.bench.paper import studies

    _run("figure10", studies.synthetic_day, baselines=("none",), **arguments)


@paper.command(
    cls=ListCommand,
    epilog=examples(
        "python -m tests.bench.paper table2 --out runs/table2.json",
        "python -m tests.bench.paper table2 --users 100000 --triggers 100",
        "python -m tests.bench.paper table2 --webis corpus-webis-tldr-17.zip --folder runs",
    ),
)
@click.option("--users", type=_SIZE, default=1_400_000, show_default=True, help="2.7 posts each.")
@click.option("--webis", type=_FILE, help="The real corpus, JSON Lines or its zip.")
@TRIGGERS
@click.option("--contributions", type=_SIZE, default=17, show_default=True, help="C.")
@MODES
@WITH_BASELINES
@COMMON
def table2(**arguments: Any) -> None:
    """Table 2: posts by subreddit, generated like Webis-TLDR-17 or the real corpus."""
    from tests.bench.paper import studies

    _run("table2", studies.table2, **arguments)


@paper.command(
    cls=ListCommand,
    epilog=examples(
        "python -m tests.bench.paper workloads --out runs/workloads.json",
        "python -m tests.bench.paper workloads --only example4 table2 --json",
        "python -m tests.bench.paper workloads --cells 256 --large 1024",
    ),
)
@click.option("--only", multiple=True, type=click.Choice(LINEAR), default=LINEAR,
              show_default=True, help="Parts.")  # fmt: skip
@click.option("--cells", type=_SIZE, default=2048, show_default=True, help="A power of 2.")
@click.option("--large", type=_SIZE, default=8192, show_default=True, help="The same, of figure4.")
@click.option("--seed", default=0, show_default=True, help="Of queries and tables.")
@click.option("--epsilon", default=0.5, show_default=True)
@click.option("--delta", default=1e-4, show_default=True)
@click.option("--out", type=_FILE, help="FILE.json, replaced if it exists.")
@AS_JSON
def workloads(
    only: tuple[str, ...], out: Path | None, as_json: bool, **arguments: Any
) -> None:  # fmt: skip
    """Linear workloads: Example 4, Table 2 and Figures 3 to 5 of the eigen-design paper."""
    _check_out(out)
    from tests.bench.paper import linear
    from tests.bench.paper.runs import provenance, save

    study = linear.Study(**arguments).check()
    parts = {name: linear.PARTS[name](study, _say) for name in dict.fromkeys(only)}
    command = " ".join(
        ["python", "-m", "tests.bench.paper", "workloads", *_flags({"only": only, **arguments})]
    )
    result = {"experiment": "workloads", **provenance(), **arguments, "command": command, **parts}
    if out is not None:
        save(result, out)
        _say(f"wrote {out}")
    if as_json:
        print_json(result)
    else:
        for name, rows in parts.items():
            click.echo(f"{name}\n{linear.words(rows)}")


@paper.command(
    epilog=examples(
        "python -m tests.bench.paper reddit posts.parquet --users 100000",
        "python -m tests.bench.paper reddit posts.parquet --webis corpus-webis-tldr-17.zip",
    )
)
@click.argument("out", type=_FILE)
@click.option("--users", type=_SIZE, default=1_400_000, show_default=True, help="2.7 posts each.")
@click.option("--webis", type=_FILE, help="Convert the real corpus (JSON Lines or its zip).")
@click.option("--seed", default=0, show_default=True, help="Same seed, same records.")
@click.option("--row-group-rows", default=1_000_000, show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@AS_JSON
def reddit(out: Path, webis: Path | None, overwrite: bool, as_json: bool, **sizes: int) -> None:
    """Write Reddit posts of one day: shaped like Webis-TLDR-17, or that corpus itself."""
    from tests.bench.paper.reddit import Reddit
    from tests.bench.paper.studies import write_posts

    tally = write_posts(Reddit(**sizes).check(), out, webis, overwrite)
    if as_json:
        print_json({"posts": tally.posts, "bad_lines": tally.malformed, "unnamed": tally.unnamed})
        return
    click.echo(f"{tally.posts:,} posts in {out.name}")
    if tally.malformed or tally.unnamed:
        click.echo(
            f"Left out: {tally.malformed:,} lines that are no JSON object, "
            f"{tally.unnamed:,} without author or subreddit.",
            err=True,
        )


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
    **arguments: Any,
) -> None:
    """Run a study; print a table or JSON; write JSON if asked to."""
    _check_out(out)
    from tests.bench.paper.runs import save
    from tests.bench.paper.studies import Study

    arguments |= {
        k: (arguments[k],) for k in ("triggers", "contributions") if isinstance(arguments[k], int)
    }
    arguments["baselines"] = tuple(b for b in arguments["baselines"] if b != "none")
    command = " ".join([*_COMMAND, name, *_flags(arguments)])
    with ExitStack() as stack:
        run_folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out = out or (folder and folder / f"{name}.json")
        notes = {"command": command}
        result = study(name, Study(folder=run_folder, notes=notes, **arguments), _say)
    if out is not None:
        save(result, out)
        _say(f"wrote {out}")
    if as_json:
        print_json(result)
    else:
        _print(result)


def _flags(arguments: dict[str, Any]) -> list[str]:
    """The parameters as flags again, defaults included."""
    flags = []
    for name, value in arguments.items():
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


if __name__ == "__main__":
    silence()
    paper(prog_name="python -m tests.bench.paper")
