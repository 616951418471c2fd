"""What tests compute once in place of Beam is what Beam computes."""

from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DebugOptions,
    PipelineOptions,
    StandardOptions,
    TypeOptions,
)

from tests import quick_beam

FLAGS = ["--runner=PrismRunner", "--streaming", "--experiments=a", "--experiments=b"]


def test_views_are_those_of_beam() -> None:
    for cls in PipelineOptions.__subclasses__():
        for flags in ([], FLAGS):
            quick = quick_beam.view(PipelineOptions(flags), cls)
            plain = quick_beam.beam_view(PipelineOptions(flags), cls)
            assert type(quick) is type(plain)
            assert quick.get_all_options() == plain.get_all_options()


def test_views_of_one_object_share_values_and_those_of_two_do_not() -> None:
    first, second = PipelineOptions(FLAGS), PipelineOptions(FLAGS)
    view = quick_beam.view(first, DebugOptions)
    view.experiments.append("c")
    quick_beam.view(first, StandardOptions).runner = "FlinkRunner"
    assert quick_beam.view(first, DebugOptions).experiments == ["a", "b", "c"]
    assert quick_beam.view(first, TypeOptions).get_all_options()["runner"] == "FlinkRunner"
    assert quick_beam.view(second, DebugOptions).experiments == ["a", "b"]
    assert quick_beam.view(second, StandardOptions).runner == "PrismRunner"


def test_a_method_that_is_replaced_has_its_own_arguments() -> None:
    class Adds(beam.DoFn):
        def process(self, element: int, by: int = 1) -> Any:
            yield element + by

    def process(self: object, element: int, by: int = 2, more: int = 3) -> Any:
        yield element

    adds = Adds()
    for _ in range(2):
        assert quick_beam.arguments(adds.process) == (["element", "by"], [1])
    Adds.process = process  # type: ignore[method-assign, assignment]
    assert quick_beam.arguments(adds.process) == (["element", "by", "more"], [2, 3])
