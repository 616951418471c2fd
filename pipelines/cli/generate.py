"""``dpstream generate``: synthetic data sets."""

from pathlib import Path
from typing import Any

import click

from dpstream.pipelines.cli.parts import AS_JSON, examples, print_json

_SIZE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)


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


@generate.command(
    epilog=examples(
        "dpstream generate reddit posts.parquet --users 100000",
        "dpstream generate reddit posts.parquet --webis corpus-webis-tldr-17.zip",
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
    from dpstream.pipelines.experiments.reddit import Reddit
    from dpstream.pipelines.experiments.studies import write_posts

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
