"""``dpstream secret``: makes a secret, or checks whether a job's can be read and fits its store."""

from pathlib import Path

import click

from dpstream.pipelines.cli.parts import AS_JSON, JOB, Chosen, examples, load_job, print_json

_WHERE = {
    "file": "in a file",
    "env": "in an environment variable",
    "gcp": "in Google Secret Manager",
    "insecure_test_secret": "in the project file: INSECURE, do not publish",
}
_STORE = {
    "new": "there is none yet: a run would begin with this secret",
    "fits": "was begun with it",
}


@click.group(short_help="Make a data set's secret, or check the one of a job.")
def secret() -> None:
    """Make the secret of a data set, or check the one of a job.

    All noise is computed from the secret: whoever has it can subtract the noise.
    """


@secret.command("new", epilog=examples("dpstream secret new noise.secret"))
@click.argument("file", type=click.Path(path_type=Path))
@AS_JSON
def secret_new(file: Path, as_json: bool) -> None:
    """Write a new random secret that only you can read; never overwrites."""
    from dpstream.pipelines.jobs.secret import new_secret

    new_secret(file)
    if as_json:
        print_json({"created": file.name})
    else:
        click.echo(f"New secret in {file.name} (mode 0600). Keep it secret and back it up.")


@secret.command("check", epilog=examples("dpstream secret check daily"))
@JOB
@AS_JSON
def secret_check(job: Chosen, as_json: bool) -> None:
    """Show whether a job's secret can be read here and whether its store was begun with it.

    The secret is not shown: the fingerprint is a keyed hash that only distinguishes secrets.
    """
    from dpstream.pipelines.jobs.secret import check_secret

    report = check_secret(load_job(job))
    if as_json:
        print_json(report)
        return
    click.echo(f"Secret       found {_WHERE[report['where']]}")
    click.echo(f"Store        {_STORE[report['store']]}")
    click.echo(f"Fingerprint  {report['fingerprint']}")
