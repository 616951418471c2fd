"""``dpstream key``: make a noise key, and check that a job's can be had and fits its store."""

from pathlib import Path

import click

from dpstream.pipelines.cli.parts import AS_JSON, JOB, Chosen, examples, load_job, print_json

_WHERE = {
    "file": "in a file",
    "env": "in an environment variable",
    "gcp": "in Google Secret Manager",
    "insecure_test_key": "in the project file: INSECURE, do not publish",
}
_STORE = {"new": "there is none yet: a run would begin with this key", "fits": "was begun with it"}


@click.group()
def key() -> None:
    """Noise keys."""


@key.command("new", epilog=examples("dpstream key new noise.key"))
@click.argument("file", type=click.Path(path_type=Path))
@AS_JSON
def key_new(file: Path, as_json: bool) -> None:
    """Write a new random noise key that only you can read; never overwrites."""
    from dpstream.pipelines.jobs.noise_key import new_key

    new_key(file)
    if as_json:
        print_json({"created": file.name})
    else:
        click.echo(f"New noise key in {file.name} (mode 0600). Keep it secret and back it up.")


@key.command("check", epilog=examples("dpstream key check daily"))
@JOB
@AS_JSON
def key_check(job: Chosen, as_json: bool) -> None:
    """Say whether a job's key can be had here and whether its store was begun with it.

    Nothing of the key is shown: the fingerprint is a keyed hash that only tells keys apart.
    """
    from dpstream.pipelines.jobs.noise_key import check_key

    report = check_key(load_job(job))
    if as_json:
        print_json(report)
        return
    click.echo(f"Key          found {_WHERE[report['where']]}")
    click.echo(f"Store        {_STORE[report['store']]}")
    click.echo(f"Fingerprint  {report['fingerprint']}")
