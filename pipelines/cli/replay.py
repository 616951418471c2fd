"""``dpstream replay``: publishes a recording again, as a live stream."""

import click

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.parts import AS_JSON, JOB, Chosen, examples, load_job, print_json
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private


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
