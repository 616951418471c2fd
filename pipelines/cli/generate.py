"""``dpstream generate``: synthetic data sets."""

from pathlib import Path
from typing import Any

import click

from dpstream.pipelines.cli.parts import AS_JSON, examples, print_json


@click.group()
def generate() -> None:
    """Make synthetic data."""


@generate.command(
    epilog=examples(
        "dpstream generate zipf small.parquet --users 10000",
        "dpstream generate zipf table1.parquet --users 10000000 --seed 1",
    )
)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--users", default=10_000, show_default=True, help="Users; 5.9 records each.")
@click.option("--keys", default=1_000_000, show_default=True, help="Keys there are to draw.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same records.")
@click.option("--start", default="2024-01-01T00:00:00Z", show_default=True, help="First instant.")
@click.option("--row-group-rows", default=1_000_000, show_default=True)
@click.option("--user-type", type=click.Choice(["int", "string"]), default="int")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@AS_JSON
def zipf(out: Path, start: str, overwrite: bool, as_json: bool, **sizes: Any) -> None:
    """Write the paper's Zipf-Mandelbrot records of one day to a Parquet file."""
    from dpstream.pipelines.jobs.text import instant_micros
    from dpstream.pipelines.synth import Synth
    from dpstream.pipelines.synth import generate as write

    rows = write(Synth(start=instant_micros("--start", start), **sizes), out, overwrite)
    if as_json:
        print_json({"records": rows, **sizes})
    else:
        click.echo(f"{rows:,} records of {sizes['users']:,} users in {out.name}")
