"""A small office: generated files that a test may spoil, and executions with a ledger."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.execute import Execution, Order, execute
from dpstream.pipelines.tabulation.generate import Size, generate
from dpstream.pipelines.tabulation.inputs import Loaded, inputs_of, load, validate
from dpstream.pipelines.tabulation.text import Fault
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import AccountPlace
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


KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"


def ledger_of(folder: Path, epsilon: float = 1e3, unit: str = "person") -> AccountPlace:
    return accounts.create(folder / "ledger.db", "people", (epsilon, 1e-9), unit)


def order(made: Office, out: Path, choice: Choice | None = None, **more: Any) -> Order:
    inputs = inputs_of(made.parameters, made.data, choice or Choice("p"))
    return Order(inputs, out, SecretSource(None, KEY), **more)


def executed(
    made: Office, out: Path, choice: Choice | None = None, fresh: bool = False, as_of: str = "",
    **more: Any,
) -> Execution:  # fmt: skip
    more["how"] = Asking(fresh, as_of)
    return execute(order(made, out, choice, **more))


def charges(folder: Path) -> list[Charge]:
    path = folder / "ledger.db"
    return accounts.charges(path)


def content(out: Path) -> dict[str, bytes]:
    """Every file of an output, and the manifest's."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def left_over(folder: Path) -> list[str]:
    """Hidden things that nobody took away."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]
