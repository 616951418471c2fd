"""``dpstream folder``: closes files of a growing folder, and finds rows of dead letters.

``dpstream replay``: publishes a recording again, as a live stream.

``dpstream audit``: measures the privacy loss of a job's mechanism on synthetic neighbours.
"""

from pathlib import Path

import click

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.parts import AS_JSON, JOB, Bar, Chosen, examples, load_job, print_json
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private
from dpstream.state.disk_errors import file_errors

PATH = click.argument("path", metavar="FOLDER_OR_URL")


@click.group(short_help="Close files of a growing folder; find a dead letter's file.")
def folder() -> None:
    """Close files of a growing folder; find the file of a dead letter."""


@folder.command(
    epilog=examples(
        "dpstream folder close incoming day/1.parquet day/2.parquet",
        "dpstream folder close gs://bucket/incoming --new",
        "dpstream folder close incoming",
    )
)
@PATH
@click.argument("files", nargs=-1)
@click.option("--new", is_flag=True, help="All complete files that no marker lists yet.")
@AS_JSON
def close(path: str, files: tuple[str, ...], new: bool, as_json: bool) -> None:
    """Write a marker: FILES are complete, and so are all files of earlier markers.

    Without files the marker says only that time has passed.
    """
    from dpstream.pipelines.connectors.folder.watch import close_files, new_files

    names = sorted({*files, *(new_files(path) if new else ())})
    marker = close_files(path, names)
    if as_json:
        print_json({"marker": marker, "files": len(names)})
    else:
        click.echo(f"{len(names):,} files closed by {marker}")


@folder.command(epilog=examples("dpstream folder find incoming 1201774219 88172645463325252"))
@PATH
@click.argument("partition", type=int)
@click.argument("offset", type=int)
@AS_JSON
def find(path: str, partition: int, offset: int, as_json: bool) -> None:
    """Show the file and row of a dead letter's position (for the operator only)."""
    from dpstream.pipelines.connectors.folder import store

    with file_errors("folder", "cannot be read"):
        names = [file.name for file in store.Folder(path).list()]
    places = store.find(names, partition, offset)
    if as_json:
        print_json([{"file": name, "row": row} for name, row in places])
        return
    for name, row in places:
        click.echo(f"row {row:,} of {name}")
    if not places:
        click.echo("no file of this folder: it may have been removed")


@click.command(
    short_help="Copy a job's files into a growing folder at their own pace.",
    epilog=examples(
        "dpstream replay recorded --to folder:incoming --speed 60",
        "dpstream replay recorded --to kafka:localhost:9092/clicks --speed 1",
        "dpstream replay recorded --to pubsub:projects/P/topics/T",
    ),
)
@JOB
@click.option(
    "--to",
    "target",
    required=True,
    help="Where to publish: folder:PATH, kafka:HOST:PORT/TOPIC or pubsub:TOPIC.",
)
@click.option(
    "--speed", default="max", show_default=True, help="Seconds of the recording per second, or max."
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Kafka's client (TLS, SASL); secrets as NAME=env:VARIABLE; repeatable.",
)
@OPERATOR
@AS_JSON
def replay(job: Chosen, target: str, speed: str, options: tuple[str, ...], as_json: bool) -> None:
    """Publish the records of JOB's files into a growing folder (Parquet files and markers) or
    as JSON messages.  For recordings that may be published there: no privacy is added.
    """
    from dpstream.pipelines.connectors.replay.republish import republish, target_of
    from dpstream.pipelines.connectors.replay.source import parse_speed

    pace, loaded = parse_speed(speed), load_job(job)
    if not all("=" in option for option in options):
        raise UsageError("--option", "names no value", "write NAME=VALUE")
    given = dict(option.split("=", 1) for option in options)
    replayed = republish(loaded, target_of(target, given), pace)
    if as_json:
        print_json(with_private({"to": target, "speed": speed}, replayed._asdict()))
        return
    click.echo("Published.")
    echo_private(
        f"{replayed.rows:,} rows published in {replayed.seconds:.1f} s, "
        f"{replayed.refused:,} refused."
    )


#: Exit code of an audit that refutes the plan's claim.
REFUTED = 5


@click.command(
    short_help="Test a job's mechanism: a lower bound of its epsilon.",
    epilog=examples(
        "dpstream audit daily",
        "dpstream audit daily --trials 100000 --picture audit.png",
        "dpstream audit daily --beam --trials 2000 --json",
    ),
)
@JOB
@click.option(
    "--trials",
    default=10_000,
    show_default=True,
    help="Number of trials on each of the two inputs.",
)
@click.option("--confidence", default=0.99, show_default=True, help="Confidence of the verdict.")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the synthetic data, not of noise."
)
@click.option("--beam", is_flag=True, help="Run the whole Beam pipeline, files included.")
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Draw the trade-off curve into this file."
)
@AS_JSON
def audit(
    job: Chosen,
    trials: int,
    confidence: float,
    seed: int,
    beam: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Test a job's mechanism as a black box: show a lower bound of epsilon beside the claim.

    Runs the real flow with the job's plan on synthetic neighbours, in a temporary folder with a
    new secret. The job's data, secret, store, sink and account are not touched, and nothing is
    charged.
    Exit code 5: the claim is refuted.
    """
    from dpstream.pipelines.audit.audit import Ask, as_dict, draw, text
    from dpstream.pipelines.audit.audit import audit as run

    with Bar(hidden=as_json, what="trials") as bar:
        result = run(load_job(job), Ask(trials, seed, confidence, beam), bar.update)
    if picture is not None:
        draw(result, picture)
    if as_json:
        print_json(as_dict(result))
    else:
        click.echo(text(result), nl=False)
    if result.refuted:
        raise SystemExit(REFUTED)
