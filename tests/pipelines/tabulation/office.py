"""A small office: generated files that a test may spoil."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.generate import Size, generate
from dpstream.pipelines.tabulation.inputs import Loaded, load, validate
from dpstream.pipelines.tabulation.text import Fault
from tests import accounts

SIZE = Size(persons=300)


class Office(NamedTuple):
    """The two folders of an office."""

    parameters: Path
    data: Path

    def path(self, name: str) -> Path:
        """A file of either folder."""
        inside = self.parameters / name
        return inside if inside.exists() else self.data / name

    def spoil(self, name: str, change: Callable[[list[str]], Any]) -> None:
        """Change the lines of a file."""
        lines = self.path(name).read_text().splitlines()
        changed = change(lines)
        self.path(name).write_text("\n".join(lines if changed is None else changed) + "\n")

    def configure(self, **fields: Any) -> None:
        """Set fields of the configuration; ``None`` takes one away."""
        path = self.parameters / "config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    def faults(self, program: Any = "p") -> list[Fault]:
        """Everything that is wrong."""
        return validate(self.parameters, self.data, Choice(program))

    def load(self, program: Any = "p") -> Loaded:
        """What is public, if nothing is wrong."""
        return load(self.parameters, self.data, Choice(program))


def office(folder: Path, size: Size = SIZE) -> Office:
    """A new office in a folder."""
    made = Office(folder / "parameters", folder / "data")
    generate(made.parameters, made.data, size)
    return made


def project(
    folder: Path,
    made: Office,
    *,
    name: str = "persons",
    secret: str | None = None,
    limit: tuple[float, float] | None = None,
    id_: str = accounts.ID,
    **fields: str,
) -> Path:
    """The project file of an office, with ``[census.NAME]`` of its data set ``NAME``.

    Args:
        secret: where it is; ``None``: there is none; limit: of an account, which is made; ``None``:
            there is no account; fields: more of the section.
    """
    unit = {"persons": "person", "households": "household"}[name]
    lines = ["version = 1", f"[data_set.{name}]", f'unit = {{ name = "{unit}" }}']
    if secret is not None:
        lines.append(f'secret = "{secret}"')
    if limit is not None:
        given = f"limit = {{ epsilon = {limit[0]!r}, delta = {limit[1]!r} }}"
        lines.append(f'account = {{ path = "{name}.account.db", {given} }}')
    places = {"parameters": str(made.parameters), "data": str(made.data), "data_set": name}
    lines.append(f"[census.{name}]")
    lines += [f'{field} = "{value}"' for field, value in {**places, **fields}.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    accounts.write(path, "\n".join(lines) + "\n", id_)
    return path
