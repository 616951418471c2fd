"""What Dataflow is handed: flags of the service, and a pipeline that ends, built with them."""

from collections.abc import Callable

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2

from dpstream.pipelines.launch.dataflow import flags, without_runner

CLOUD = ["--project=p", "--region=europe-west4", "--temp_location=gs://b/t",
         "--sdk_container_image=europe-docker.pkg.dev/p/r/dpstream:1"]  # fmt: skip


def built(transforms: Callable[[beam.Pipeline], None]) -> tuple[set[str], bytes]:
    """Names of the transforms and the bytes of a pipeline, all of whose collections end."""
    options = PipelineOptions(without_runner(flags(CLOUD, streaming=False)))
    pipeline = beam.Pipeline(options=options)
    transforms(pipeline)
    proto = pipeline.to_runner_api()
    bounded = {collection.is_bounded for collection in proto.components.pcollections.values()}
    assert bounded == {beam_runner_api_pb2.IsBounded.BOUNDED}
    names = {transform.unique_name for transform in proto.components.transforms.values()}
    return names, proto.SerializeToString()
