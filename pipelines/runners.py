"""Which engine runs a job; always named, never guessed from the pipeline."""

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    PipelineOptions,
    _BeamArgumentParser,
)
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.prism_runner import PrismRunner

from accounting.errors import UsageError

#: Names a user may write and the engine they mean.
RUNNERS = {
    "DirectRunner": "FnApiRunner",
    "FnApiRunner": "FnApiRunner",
    "PrismRunner": "PrismRunner",
}


class Engine(NamedTuple):
    """What runs a pipeline.

    Attributes:
        runner, options: for ``beam.Pipeline``.
        streaming: input is taken as a stream, also files: releases come while it is read.
        by_reference: stages share one process and decode each element once.
    """

    runner: Any
    options: PipelineOptions
    streaming: bool
    by_reference: bool


def make_runner(name: str, beam_args: Sequence[str]) -> Engine:
    """The engine of a runner's name and further Beam flags.

    Raises:
        UsageError: an unknown runner, or flags that break the flow's promises.
    """
    if name not in RUNNERS:
        raise UsageError(
            "--runner", f"must be one of {', '.join(RUNNERS)}", "use --runner=DirectRunner"
        )
    _refuse_unknown(beam_args)
    options = PipelineOptions(list(beam_args), runner=RUNNERS[name])
    if options.view_as(DirectOptions).direct_num_workers != 1:
        raise UsageError(
            "--direct_num_workers",
            "must be 1: several processes would share one worker's state",
            "leave it out; use more shards on a distributed runner",
        )
    if "enable_data_sampling" in (options.view_as(DebugOptions).experiments or []):
        raise UsageError(
            "--experiments=enable_data_sampling", "would hand records to the runner", "leave it out"
        )
    if "enable_hot_key_logging" in options.get_all_options(drop_default=True):
        raise UsageError("--enable_hot_key_logging", "would write keys into logs", "leave it out")
    if name == "PrismRunner":
        return Engine(PrismRunner(), options, streaming=True, by_reference=False)
    return Engine(FnApiRunner(), options, streaming=False, by_reference=True)


def _refuse_unknown(beam_args: Sequence[str]) -> None:
    """A flag that neither this program nor Beam knows is a typing error, not a silent no-op."""
    known = {"runner"}
    for options in PipelineOptions.__subclasses__():
        beam_parser = _BeamArgumentParser(add_help=False)
        options._add_argparse_args(beam_parser)
        known |= {flag.lstrip("-") for a in beam_parser._actions for flag in a.option_strings}
    for argument in beam_args:
        flag = argument.lstrip("-").partition("=")[0]
        if argument.startswith("--") and flag not in known:
            close = difflib.get_close_matches(flag, known, 1)
            fix = f"did you mean --{close[0]}?" if close else "leave it out"
            raise UsageError(f"--{flag}", "is no flag of this program or of Beam", fix.rstrip("?"))
