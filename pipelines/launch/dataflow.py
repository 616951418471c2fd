"""Shared parts of what the launcher starts: Beam's flags for Dataflow, places, submission.

A launcher must end once Dataflow has the pipeline, so nothing waits here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.runners.table import (
    RUNNERS,
    make_runner,
    refuse_at_least_once,
    refuse_unknown,
)

RUNNER = "DataflowRunner"


def flags(given: Sequence[str], streaming: bool) -> list[str]:
    """Return Beam's flags for Dataflow: the given ones, and those that the pipeline needs.

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
    """Return Beam's options by name, for a dry run."""
    options = PipelineOptions(list(beam_args)).get_all_options(drop_default=True)
    return {name: value for name, value in sorted(options.items()) if value is not None}


def without_runner(beam_args: Sequence[str]) -> list[str]:
    """Return Beam's flags without that of the runner."""
    return [flag for flag in beam_args if not flag.startswith("--runner=")]


def submit(built: Callable[[beam.Pipeline], None], beam_args: Sequence[str]) -> None:
    """Submit a pipeline that ends to Dataflow, and return without waiting.

    Args:
        built: adds the transforms to the pipeline that it is called with.
    """
    engine = make_runner(RUNNER, without_runner(beam_args))
    engine.options.view_as(StandardOptions).streaming = False
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    built(pipeline)
    pipeline.run()


def in_stores(places: Mapping[str, str], secret: SecretSource) -> list[str]:
    """Return the folders that workers can reach, without a slash at the end.

    Args:
        places: by the field or parameter that names each.

    Raises:
        UsageError: a folder, or the secret, is on the launcher's machine, which is deleted
            afterwards.
    """
    fixes = {field: "use gs://" for field, place in places.items() if "://" not in place}
    if secret.kind != "gcp":
        fixes["secret"] = (
            "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves"
        )
    for field, fix in fixes.items():
        raise UsageError(field, "is on the launcher's machine, which is thrown away", fix)
    return [place.rstrip("/") for place in places.values()]
