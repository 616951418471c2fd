"""``dpstream folder``: closes files of a growing folder, and finds rows of dead letters."""

import click

from dpstream.pipelines.cli.parts import AS_JSON, examples, print_json
from dpstream.state.disk_errors import file_errors

PATH = click.argument("path", metavar="FOLDER_OR_URL")


@click.group(short_help="Close files of a growing folder; find a dead letter's file.")
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
    from dpstream.pipelines.connectors.folder.watch import close_files, new_files

    names = sorted({*files, *(new_files(path) if new else ())})
    marker = close_files(path, names)
    if as_json:
        print_json({"marker": marker, "files": len(names)})
    else:
        click.echo(f"{len(names):,} files closed by {marker}")


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
    if as_json:
        print_json([{"file": name, "row": row} for name, row in places])
        return
    for name, row in places:
        click.echo(f"row {row:,} of {name}")
    if not places:
        click.echo("no file of this folder: it may have been removed")
