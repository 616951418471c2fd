"""The connectors of sources and sinks: the one place that maps their kinds to classes.

A connector, with its client's library, is loaded when a job asks for it.

A new kind of sink is a module ``pipelines.connectors.KIND.sink`` with a subclass of `Sink` and the
function ``open_sink(job, run_id)``, and its declaration in `pipelines.project.job_section`.
"""

from importlib import import_module

from dpstream.accounting.extras import require
from dpstream.dp_transforms.release import stamped_run_id
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.input_files import InputWatch
from dpstream.pipelines.connectors.inputs import Input
from dpstream.pipelines.connectors.sink import Sink
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import SERVICE_SINKS


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
    folder = job.sink.kind if job.sink.kind in SERVICE_SINKS else "files"
    module = import_module(f"dpstream.pipelines.connectors.{folder}.sink")
    run_id = None if run is None else stamped_run_id(run.plan, run.open().identity)
    sink: Sink = module.open_sink(job, run_id)
    sink.watch = watch
    return sink
