"""``dpstream folder``: closes files of a growing folder, and finds rows of dead letters.

``dpstream replay``: publishes a recording again, as a live stream.

``dpstream state``: shows a job's store; expires, backs up, restores and reshards it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import up
from dpstream.accounting.places import RELEASE_KINDS
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    JOB,
    Bar,
    Chosen,
    Commands,
    examples,
    load_job,
    print_figures,
    print_json,
    section,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, requested
from dpstream.pipelines.render.layout import count, labelled, page
from dpstream.state.disk_errors import file_errors

if TYPE_CHECKING:
    from dpstream.accounting.places import ReleaseKind


@click.group(cls=Commands, short_help="Show and manage a job's state store.")
def state() -> None:
    """Show and manage a job's state store; nothing private is shown."""


@state.command(epilog=examples("dpstream state init daily"))
@JOB
@AS_JSON
def init(job: Chosen, as_json: bool) -> None:
    """Make a job's store and commit its run id, without running.

    Nothing is drawn and nothing is charged: `dpstream run` charges before it draws noise.
    """
    from dpstream.pipelines.operate.state_admin import initialise

    run_id, fresh = initialise(load_job(job))
    text = f"Run {run_id}: the store {'is made' if fresh else 'was there already'}."
    print_figures(as_json, {"run_id": run_id, "new": fresh}, text)


@state.command(
    epilog=examples(
        "dpstream state info daily",
        "dpstream state info daily --json",
        "dpstream state info daily --operator",
    )
)
@JOB
@OPERATOR
@AS_JSON
def info(job: Chosen, as_json: bool) -> None:
    """Show the run of a store and its progress; with --operator also the sizes of the store's
    parts, and whether the run's input changed."""
    from dpstream.pipelines.operate.state_admin import info as look

    status = look(load_job(job), requested())
    if as_json:
        print_json(status)
        return
    click.echo(page(_status_lines(status)), nl=False)
    if requested():
        print_private(status["operator_only"])


def _status_lines(status: dict[str, Any]) -> list[str]:
    """Return the run and the progress of a store as text."""
    total = "" if status["windows"] is None else f" of {status['windows']:,}"
    open_windows = (
        f"window {window}: trigger {trigger} of {status['triggers']}"
        for window, trigger in status["committed"].items()
        if trigger < status["triggers"]
    )
    run = f"{status['run_id']}, epoch {status['epoch']}, {count(status['shards'], 'shard')}"
    lines = [
        *labelled("Run", run),
        *labelled("Plan", status["plan_hash"]),
        *labelled("Windows", f"{status['complete']:,}{total} are complete", *open_windows),
    ]
    notes = {
        "dropped": f"releases of windows before {status['dropped']}: the sink has them",
        "abandoned": f"windows before {status['abandoned']}: they get no more releases",
        "restoring": "the next run compares with the sink before it publishes",
    }
    labels = {"restoring": "Restored"}
    for name, note in notes.items():
        lines += labelled(labels.get(name, name.capitalize()), note) if status[name] else []
    return lines


def print_private(sizes: dict[str, Any]) -> None:
    """Print the sizes of a store's parts, and whether its input changed."""
    if sizes["input_changed"]:
        echo_private("a file changed while a run read it: begin a new run with --fresh.")
    echo_private("sizes tell about the number of units and keys.")
    if sizes["bytes"] is not None:
        echo_private(f"{'file':<10}{sizes['bytes'] / 2**20:12,.1f} MiB")
    for part in sizes["parts"]:
        where = "" if part["window"] is None else f", window {part['window']}"
        size = f"{part['bytes'] / 2**20:12,.1f} MiB in {count(part['rows'], 'row')}"
        echo_private(f"{part['name']:<10}{size}{where}")


@state.command(
    epilog=examples(
        "dpstream state releases daily",
        "dpstream state releases daily --out again --kind jsonl",
    )
)
@JOB
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to write files to.  [default: the job's own sink]",
)
@click.option(
    "--kind",
    type=click.Choice(RELEASE_KINDS),
    help="Format of the files in --out.  [default: the job's]",
)
@AS_JSON
def releases(job: Chosen, out: Path | None, kind: "ReleaseKind | None", as_json: bool) -> None:
    """Write all committed releases from the store itself: the same bytes as the run's sink got.

    An existing release is left as it is; one with different content is refused. Without --out
    they are written to the job's own sink: one that was emptied, or a new one.
    """
    from dpstream.pipelines.connectors.registry import sink_of
    from dpstream.pipelines.operate.state_admin import export, publish

    if out is None and kind is not None:
        raise UsageError("--kind", "is for files in a folder", "name the folder with --out")
    checked = load_job(job)
    where = str(out) if out is not None else sink_of(checked).place
    with Bar(hidden=as_json) as bar:
        written = (
            publish(checked, bar.update)
            if out is None
            else export(checked, out, kind or checked.sink.file_kind, bar.update)
        )
    print_figures(as_json, {"releases": written, "out": where}, f"Releases: {written:,} in {where}")


@state.command(
    epilog=examples("dpstream state final daily", "dpstream state final daily --out daily.csv")
)
@JOB
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The file to write: .parquet, .csv or .jsonl.  [default: _final.KIND in the folder of the"
    " releases, else JOB.final.parquet]",
)
@AS_JSON
def final(job: Chosen, out: Path | None, as_json: bool) -> None:
    """Write the final table: of each key and window the newest figure, its error and its quality.

    It spends no budget. If the sink is files, `dpstream run` writes the table at the end of each
    run or pass. Type this command for a stream without end, and for other sinks.
    """
    from dpstream.pipelines.connectors.final import FINAL
    from dpstream.pipelines.operate.state_admin import final as write
    from dpstream.pipelines.render.page import ending_of

    if out is not None:
        ending_of(out, RELEASE_KINDS)
    checked = load_job(job)
    folder, kind = checked.sink.folder, checked.sink.file_kind
    out = out or Path(folder or "", f"{FINAL if folder else f'{checked.name}.final'}.{kind}")
    rows = write(checked, out)
    print_figures(as_json, {"rows": rows, "out": str(out)}, f"{count(rows, 'row')} in {out}")


@state.command(
    epilog=examples(
        "dpstream state expire daily",
        "dpstream state expire daily --releases-before 2024-02-01T00:00:00Z",
    )
)
@JOB
@click.option(
    "--releases-before",
    metavar="INSTANT",
    help="Also drop releases of windows that are complete by this instant, if the sink has"
    " all of them.",
)
@AS_JSON
def expire(job: Chosen, releases_before: str | None, as_json: bool) -> None:
    """Drop what no run can need any more, and return the space to the disk.

    This drops positions of records whose windows are all complete, and counters of closed privacy
    periods. Counters of open periods stay. Releases stay without --releases-before, because a
    lost sink can be written again from them. A run expires positions by itself; this command also
    compacts the file, which needs as much free space as the file's size.
    """
    from dpstream.pipelines.operate.state_admin import expire as run

    with Bar(hidden=as_json) as bar:
        done = run(load_job(job), releases_before, bar.update)
    lines = [f"Deleted settled records of {count(done['shards_expired'], 'shard')}."]
    if releases_before is not None:
        lines.append(f"Deleted the releases of {count(done['windows_dropped'], 'window')}.")
    print_figures(as_json, done, page(lines))


@state.command(epilog=examples("dpstream state backup daily --out monday.backup"))
@JOB
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@AS_JSON
def backup(job: Chosen, out: Path, as_json: bool) -> None:
    """Write all of a store to one file, as of one instant; the job may run meanwhile.

    The file holds unit ids and exact counts: keep it as private as the store. It does not hold
    the secret: back that up separately. An existing file is never overwritten.
    """
    from dpstream.pipelines.operate.state_admin import backup as run

    with Bar(hidden=as_json, what="pages") as bar:
        run_id = run(load_job(job), out, bar.update)
    text = f"Run {run_id}: backup in {out}, checked."
    print_figures(as_json, {"run_id": run_id, "out": str(out)}, text)


@state.command(
    epilog=examples(
        "dpstream state restore daily monday.backup",
        "dpstream state restore daily monday.backup --replace",
        "dpstream state restore daily monday.backup --abandon --now 2024-02-01T12:00:00Z",
    )
)
@section("job", required=True)
@click.argument("backup", type=click.Path(path_type=Path))
@click.option(
    "--replace", is_flag=True, help="Replace an existing store, which is kept under another name."
)
@click.option("--abandon", is_flag=True, help="The input cannot be read again; see above.")
@click.option(
    "--now",
    metavar="INSTANT",
    help="With --abandon: an instant after everything that was read or released.",
)
@AS_JSON
def restore(
    job: Chosen, backup: Path, replace: bool, abandon: bool, now: str | None, as_json: bool
) -> None:
    """Restore a store from a backup; the next run reads its input again from the beginning.

    That run commits again what is missing, compares every release with what the sink has, stops
    at the first difference, and publishes nothing new before all of it has been compared. It
    spends nothing, because it draws the same noise on the same data.

    Use --abandon for input that cannot be read again: windows that begin at --now or before get no
    further release, all units of the backup count as exhausted, and the run continues with
    new noise. That is a second spend, charged in the account at once or refused.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.pipelines.operate import state_admin

    if now is not None and not abandon:
        raise UsageError("now", "goes with --abandon", "give both, or neither")
    checked = load_job(job)
    with Bar(hidden=as_json, what="parts") as bar:
        if abandon:
            done = state_admin.abandon(checked, backup, now, replace, bar.update)
        else:
            done = state_admin.restore(checked, backup, replace, bar.update)
    if as_json:
        print_json(done)
        return
    click.echo(f"Run {done['run_id']}, epoch {done['epoch']}: restored.")
    if done["kept"]:
        click.echo(f"The old store is kept in {done['kept']}")
    if abandon:
        click.echo(
            f"{done['epochs']} epochs cost sqrt({done['epochs']}) mu = {up(done['mu'], 4)} per "
            f"unit: epsilon {up(done['epsilon'], 4)} at delta {up(done['delta'], 3)} in all"
            f" ({'charged' if done['charged'] else 'no account: nothing was charged'})."
        )


@state.command(epilog=examples("dpstream state reshard daily --shards 8"))
@JOB
@click.option(
    "--shards", required=True, type=int, help="The new number of key shards and of unit shards."
)
@AS_JSON
def reshard(job: Chosen, shards: int, as_json: bool) -> None:
    """Distribute a store over another number of shards; no release changes by a byte.

    No run may continue meanwhile (a file that is open is refused). The old store is kept; change
    `shards` in the job afterwards.
    """
    from dpstream.pipelines.operate.state_admin import reshard as run

    with Bar(hidden=as_json, what="parts") as bar:
        old_store = run(load_job(job), shards, bar.update)
    where = f"is kept in {old_store}" if old_store else "stays in the database until it is expired"
    lines = [f"{shards} shards; the old store {where}", f"Now set `shards = {shards}` in the job."]
    print_figures(as_json, {"shards": shards, "kept": old_store}, page(lines))


PATH = click.argument("path", metavar="FOLDER_OR_URL")


@click.group(cls=Commands, short_help="Close files of a growing folder; find a dead letter's file.")
def folder() -> None:
    """Close files of a growing folder; find the file of a dead letter."""


@folder.command(
    epilog=examples(
        "dpstream folder close incoming day/1.parquet day/2.parquet",
        "dpstream folder close gs://bucket/incoming --new",
        "dpstream folder close incoming",
    )
)
@PATH
@click.argument("files", nargs=-1)
@click.option("--new", is_flag=True, help="All complete files that no marker lists yet.")
@AS_JSON
def close(path: str, files: tuple[str, ...], new: bool, as_json: bool) -> None:
    """Write a marker: FILES are complete, and so are all files of earlier markers.

    Without files the marker says only that time has passed.
    """
    from dpstream.pipelines.connectors.folder.store import close_files, new_files

    names = sorted({*files, *(new_files(path) if new else ())})
    marker = close_files(path, names)
    text = f"{count(len(names), 'file')} closed by {marker}"
    print_figures(as_json, {"marker": marker, "files": len(names)}, text)


@folder.command(epilog=examples("dpstream folder find incoming 1201774219 88172645463325252"))
@PATH
@click.argument("partition", type=int)
@click.argument("offset", type=int)
@AS_JSON
def find(path: str, partition: int, offset: int, as_json: bool) -> None:
    """Show the file and row of a dead letter's position (for the operator only)."""
    from dpstream.pipelines.connectors.folder import store

    with file_errors("folder", "cannot be read"):
        names = [file.name for file in store.Folder(path).list()]
    places = store.find(names, partition, offset)
    lines = [f"row {row:,} of {name}" for name, row in places]
    text = page(lines or ["no file of this folder: it may have been removed"])
    print_figures(as_json, [{"file": name, "row": row} for name, row in places], text)
