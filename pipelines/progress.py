"""The progress bar of commands and of measured runs."""

from dataclasses import dataclass


@dataclass
class Bar:
    """A progress bar on stderr that counts public things (by default steps: windows x triggers x
    shards), never records."""

    hidden: bool
    what: str = "steps"

    def __enter__(self) -> "Bar":
        from rich import progress as shown
        from rich.console import Console

        columns = (
            shown.TextColumn(self.what),
            shown.BarColumn(),
            shown.MofNCompleteColumn(),
            shown.TimeElapsedColumn(),
        )
        self._progress = shown.Progress(
            *columns, console=Console(stderr=True), disable=self.hidden, transient=True
        )
        self._progress.start()
        self._task = self._progress.add_task(self.what, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` steps (0: nobody knows)."""
        self._progress.update(self._task, completed=done, total=total or None)
