"""``dpstream state``: look into a job's store and export what it has committed."""

from pathlib import Path

import click

from pipelines.cli_parts import AS_JSON, Bar, examples, print_json

JOB = click.argument("job", type=click.Path(path_type=Path))


@click.group()
def state() -> None:
    """Look into a job's state store; nothing private is shown."""


@state.command(
    epilog=examples("dpstream state info job.toml", "dpstream state info job.toml --json")
)
@JOB
@AS_JSON
def info(job: Path, as_json: bool) -> None:
    """Say which run a store holds, how far it is and how large."""
    from pipelines.job import load_job
    from pipelines.state_view import info as look

    found = look(load_job(job))
    if as_json:
        print_json(found)
        return
    click.echo(f"Run       {found['run_id']}, epoch {found['epoch']}, {found['shards']} shards")
    click.echo(f"Plan      {found['plan_hash']}")
    ended = sum(trigger == found["triggers"] for trigger in found["committed"].values())
    click.echo(f"Windows   {ended:,} of {found['windows']:,} are complete")
    for window, trigger in found["committed"].items():
        if trigger < found["triggers"]:
            click.echo(f"          window {window}: trigger {trigger} of {found['triggers']}")
    if found["bytes"] is not None:
        click.echo(f"Size      {found['bytes'] / 2**20:,.1f} MiB")


@state.command(
    epilog=examples(
        "dpstream state releases job.toml --out releases",
        "dpstream state releases job.toml --out again --kind jsonl",
    )
)
@JOB
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option("--kind", type=click.Choice(["parquet", "csv", "jsonl"]), help="Default: the job's.")
@AS_JSON
def releases(job: Path, out: Path, kind: str | None, as_json: bool) -> None:
    """Write all committed releases from the store itself: the same bytes as the run's sink got.

    A release that is there already is left as it is; one with another content is refused.
    """
    from pipelines.job import load_job
    from pipelines.state_view import export

    checked = load_job(job)
    with Bar(hidden=as_json) as bar:
        written = export(checked, out, kind or checked.sink.kind, bar.update)
    if as_json:
        print_json({"releases": written, "out": str(out)})
    else:
        click.echo(f"{written:,} releases in {out}")
