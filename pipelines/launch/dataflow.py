"""What the flex templates share: Beam's flags for Dataflow, the command line of a launcher.

A template's launcher must end once the pipeline is handed over, so nothing waits here.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.runners.settings import refuse_at_least_once
from dpstream.pipelines.runners.table import RUNNERS, make_runner, refuse_unknown
from dpstream.state.private_log import unexpected

RUNNER = "DataflowRunner"


def flags(given: Sequence[str], streaming: bool) -> list[str]:
    """Beam's flags for Dataflow: those given, and what the pipeline rests on.

    Args:
        streaming: whether the input has no end.

    Raises:
        UsageError: a flag that breaks exactly-once processing, one that neither the template nor
            Beam knows, or another runner.
    """
    refuse_unknown(given, RUNNERS[RUNNER].flags)
    parsed = PipelineOptions(list(given))
    refuse_at_least_once(parsed)
    options = parsed.get_all_options()
    if options["runner"] not in (None, RUNNER):
        raise UsageError("--runner", f"must be {RUNNER} here", "leave it out")
    if options["streaming"] and not streaming:
        raise UsageError("--streaming", "is for jobs without an end", "leave it out")
    added = [f"--runner={RUNNER}"] if options["runner"] is None else []
    if streaming and not options["streaming"]:
        added.append("--streaming")
    if options["sdk_container_image"] and options["sdk_location"] == "default":
        added.append("--sdk_location=container")  # the image has the SDK: nothing is staged
    return [*given, *added]


def options_of(beam_args: Sequence[str]) -> dict[str, Any]:
    """What Beam is given, by name: for a dry run."""
    options = PipelineOptions(list(beam_args)).get_all_options(drop_default=True)
    return {name: value for name, value in sorted(options.items()) if value is not None}


def without_runner(beam_args: Sequence[str]) -> list[str]:
    """Beam's flags but that of the runner."""
    return [flag for flag in beam_args if not flag.startswith("--runner=")]


def submit(built: Callable[[beam.Pipeline], None], beam_args: Sequence[str]) -> None:
    """Hand a pipeline that ends over to Dataflow, and come back.

    Args:
        built: puts the transforms into the pipeline that it is given.
    """
    engine = make_runner(RUNNER, without_runner(beam_args))
    engine.options.view_as(StandardOptions).streaming = False
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    built(pipeline)
    pipeline.run()


def in_stores(places: Mapping[str, str], secret: SecretSource) -> list[str]:
    """The folders that workers reach, without a slash at the end.

    Args:
        places: by the field or parameter that names each.

    Raises:
        UsageError: one of them, or the secret, is on a machine that is thrown away.
    """
    fixes = {field: "use gs://" for field, place in places.items() if "://" not in place}
    if secret.kind != "gcp":
        fixes["secret"] = (
            "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves"
        )
    for field, fix in fixes.items():
        raise UsageError(field, "is on the launcher's machine, which is thrown away", fix)
    return [place.rstrip("/") for place in places.values()]


def parser(
    words: str, optional: Mapping[str, str] | None = None, **required: str
) -> argparse.ArgumentParser:
    """Parameters of a template; all others are Beam's.

    Args:
        words: what it does; required: help of each parameter that must be given; optional: of each
            that may be.
    """
    arguments = argparse.ArgumentParser(description=words, allow_abbrev=False)
    for name, text in required.items():
        arguments.add_argument(f"--{name}", required=True, help=text)
    for name, text in (optional or {}).items():
        arguments.add_argument(f"--{name}", help=text)
    arguments.add_argument(
        "--dry_run",
        nargs="?",
        const="true",
        default="false",
        choices=("true", "false"),
        help="check the parameters and print the options, start nothing",
    )
    return arguments


def launched(
    of: argparse.ArgumentParser,
    start: Callable[[argparse.Namespace, list[str]], dict[str, Any]],
    argv: Sequence[str] | None,
) -> int:
    """A launcher's command line; exit codes as of ``dpstream``.

    Args:
        start: what is printed of the launcher's own parameters and Beam's flags.
    """
    own, beam_args = of.parse_known_args(argv)
    try:
        print(json.dumps(start(own, beam_args)))
        return 0
    except DpstreamError as error:
        coded = error
    except Exception as error:
        coded = unexpected("launch", error)
    print(f"{coded.kind}: {coded}")
    return coded.exit_code
