"""The connectors of sources and sinks: the one place that maps their kinds to classes.

A connector, with its client's library, is loaded when a job asks for it.
"""

from dpstream.accounting.extras import require
from dpstream.dp_transforms.release import stamped_run_id
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.input_files import InputWatch
from dpstream.pipelines.connectors.inputs import Input
from dpstream.pipelines.connectors.sink import Sink
from dpstream.pipelines.jobs.job import Job


def input_of(job: Job) -> Input:
    """Return the input of a job by its kind.

    Raises:
        UsageError: the source cannot be used as the job says, or its package is missing.
    """
    kind = job.source.kind
    if kind == "kafka":
        require("kafka", "table.format")
        from dpstream.pipelines.connectors.kafka.source import KafkaInput

        return KafkaInput(job)
    if kind == "folder":
        from dpstream.pipelines.connectors.folder.source import FolderInput

        return FolderInput(job)
    if kind == "pubsub":
        require("pubsub", "table.format")
        from dpstream.pipelines.connectors.pubsub.source import PubSubInput

        return PubSubInput(job)
    from dpstream.pipelines.connectors.files.source import FilesInput

    return FilesInput(job)


def sink_of(job: Job, run: Run | None = None, watch: InputWatch | None = None) -> Sink:
    """Return the sink of a job by its kind.

    Args:
        job: the job whose sink is opened.
        run: the run whose releases are written; only a sink that cannot be read back needs it.
        watch: compares the run's input before every release.
    """
    sink = _sink(job, run)
    sink.watch = watch
    return sink


def _sink(job: Job, run: Run | None) -> Sink:
    sink = job.sink
    run_id = None if run is None else stamped_run_id(run.plan, run.open().identity)
    if sink.kind == "kafka":
        from dpstream.pipelines.connectors.kafka.sink import KafkaSink

        timeline = job.plan.timeline
        return KafkaSink(sink.servers or "", sink.topic or "", sink.options, timeline)
    if sink.kind == "pubsub":
        from dpstream.pipelines.connectors.pubsub.sink import PubsubSink

        return PubsubSink(sink.topic or "", run_id)
    if sink.kind == "bigquery":
        from dpstream.pipelines.connectors.bigquery.sink import BigQuerySink

        return BigQuerySink(sink.table or "", job.plan, run_id)
    from dpstream.pipelines.connectors.files.sink import FileSink

    return FileSink(sink.path, sink.kind, sink.guarded)
