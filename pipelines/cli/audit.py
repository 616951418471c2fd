"""``dpstream audit``: measures the privacy loss of a job's mechanism on synthetic neighbours."""

from pathlib import Path

import click

from dpstream.pipelines.cli.parts import AS_JSON, JOB, Bar, Chosen, examples, load_job, print_json

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
