"""The project file ``dpstream.toml``: finding, decoding and writing it.

A command finds the file in the current folder or in a parent, up to the root of the repository.
``--env NAME`` uses the places of ``[env.NAME]``, ``--set FIELD=VALUE`` sets one place.  Neither can
change what a plan's hash depends on: a plan names its input as the file does, without them.

It is written complete and durable, with its present rights, and never over what another program has
written meanwhile.

Unit, account and secret of a data set, which its tables and questions share, are looked up here.
"""

import codecs
import contextlib
import re
import stat
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError, closest
from dpstream.accounting.places import check_path
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.project.sections import (
    PLACE,
    AccountSection,
    CensusSection,
    DataSetSection,
    ProjectSections,
    TableSection,
    UnitSection,
    WorkloadSection,
)
from dpstream.pipelines.project.text import (
    parse_toml,
    raise_decode_error,
    read_at_most,
    refuse_data_dependent,
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once, replacing, sync
from dpstream.state.ledger.open import (
    PROJECT_FILE,
    AccountPlace,
    check_names,
    place_below,
    refuse_limit,
)
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.pipelines.project.job_section import JobSection


Struct = TypeVar("Struct", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


class Project(NamedTuple):
    """A decoded project file.

    Attributes:
        path: the file's absolute path; relative paths in it start from its folder.
        sections: with the places of the environment and of ``--set``.
        written: as the file has them; plans name inputs by these.
        environment: the environment's name; ``None``: none was chosen.
    """

    path: Path
    sections: ProjectSections
    written: ProjectSections
    environment: str | None = None

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return self.path.parent

    def job(self, name: str | None = None) -> tuple[str, "JobSection"]:
        """Return a job by its name; without one the only job.

        Raises:
            UsageError: there is no such job, or it has an unknown field or lacks one.
        """
        name, table = self.job_as_written(name)
        from dpstream.pipelines.project.job_section import JobSection  # loads the mathematics

        return name, decoded(table, JobSection, f"job.{name}")

    def job_as_written(self, name: str | None = None) -> tuple[str, dict[str, Any]]:
        """Return a job by its name, not decoded: it may lack fields that a command adds to it."""
        return section_named(self.sections.job, "job", name)

    def workload(self, name: str | None = None) -> tuple[str, WorkloadSection]:
        """Return a workload by its name; without one the only workload."""
        return section_named(self.sections.workload, "workload", name)

    def census(self, name: str | None = None) -> tuple[str, CensusSection]:
        """Return a census run by its name; without one the only one."""
        return section_named(self.sections.census, "census", name)

    def table(self, name: str, field: str) -> TableSection:
        """Return a table by its name.

        Args:
            field: the field that has the name.
        """
        if name not in self.sections.table:
            raise UsageError(field, f"no table '{name}'", closest(name, self.sections.table))
        return self.sections.table[name]

    def data_set(self, name: str | None, field: str) -> tuple[str, DataSetSection]:
        """Return a data set by its name; without one the only data set.

        Args:
            field: the field that has the name, or could have it.
        """
        data_sets = self.sections.data_set
        if name is not None and name not in data_sets:
            raise UsageError(field, f"no data set '{name}'", closest(name, data_sets))
        return section_named(data_sets, "data_set", name, field)


def section_named(
    sections: Mapping[str, Any], kind: str, name: str | None, field: str | None = None
) -> tuple[str, Any]:
    """Return a section by its name; without one the only section of its kind."""
    where = field or kind
    if name is None and len(sections) == 1:
        return next(iter(sections.items()))
    if not sections:
        raise UsageError(
            where,
            f"{PROJECT_FILE} has no [{kind}.NAME]",
            "type `dpstream init FILE`, which adds it",
        )
    if name is None:
        raise UsageError(
            where, f"{PROJECT_FILE} has several: {', '.join(sorted(sections))}", "name one of them"
        )
    if name not in sections:
        raise UsageError(where, f"no {kind} '{name}' in {PROJECT_FILE}", closest(name, sections))
    return name, sections[name]


def is_name(text: str) -> bool:
    """Return whether a section can have this name."""
    return _NAME.fullmatch(text) is not None


def check_name(field: str, name: str) -> None:
    """Refuse a name that no section can have; ``field`` is where it was given."""
    if not is_name(name):
        raise UsageError(field, "is not a usable name", "use letters, digits, _ and -")


def free_name(name: str, taken: Container[str]) -> str:
    """Return the name, or the name with the first number that makes it unused."""
    return next(n for n in (name, *(f"{name}{i}" for i in range(2, 10_000))) if n not in taken)


def find(start: Path) -> Path | None:
    """Return the project file of a folder: there or in a parent, up to the repository's root."""
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / PROJECT_FILE).is_file():
            return folder / PROJECT_FILE
        if (folder / ".git").exists():
            return None
    return None


def locate(path: Path | None = None) -> Path:
    """Return the project file that a command uses.

    Args:
        path: value of ``--project``: the file, or its folder.

    Raises:
        UsageError: there is no project file.
    """
    if path is not None:
        check_path(str(path), PROJECT_FILE)
        path = path.absolute()
        return path / PROJECT_FILE if path.is_dir() else path
    project_file = find(Path.cwd())
    if project_file is None:
        raise UsageError(
            PROJECT_FILE,
            "is neither in this folder nor in a parent up to the root of the repository",
            "type `dpstream init FILE`, which writes it, or name it with --project FILE",
        )
    return project_file


def load_project(
    path: str | Path | None = None,
    environment: str | None = None,
    settings: Sequence[str] = (),
    tries: Sequence[str] = (),
) -> Project:
    """Return the decoded project file.

    Args:
        path: see `locate`.
        environment: value of ``--env``.
        settings: ``FIELD=VALUE`` of ``--set``; of several for one field the last one counts.
        tries: ``FIELD=VALUE`` of ``plan --try``, for any field, as if the file had it.

    Raises:
        UsageError: the file cannot be read, is not TOML, has an unknown field, or a setting is
            not a place.
        PolicyError: a setting by which records would decide when something is published.
    """
    if isinstance(settings, str):
        raise UsageError("--set", "is one text", 'write settings=["FIELD=VALUE"]')
    path = locate(None if path is None else Path(path))
    keep_beside(path)
    text = read_at_most(path, path.name, f"give a {PROJECT_FILE}")
    return decode_project(text, path, environment, settings, tries)


def decode_project(
    text: bytes,
    path: Path,
    environment: str | None = None,
    settings: Sequence[str] = (),
    tries: Sequence[str] = (),
) -> Project:
    """Return the project of a text; raises as `load_project` does."""
    tables = parse_toml(text)
    for field, value in (_setting("--try", setting) for setting in tries):
        _put(tables, field, value)
    for name, job in _tables(tables.get("job")).items():
        refuse_data_dependent({f"job.{name}": job})
    refuse_limit(tables)
    written = _sections(tables)
    _check_names(written)
    changes = dict[_Field, Any]()
    if environment is not None:
        if environment not in written.env:
            raise UsageError("--env", f"no [env.{environment}]", closest(environment, written.env))
        changes |= dict(_leaves((), written.env[environment]))
    for name in written.env:
        for field, _ in _leaves((), written.env[name]):
            _check_place(f"env.{name}", field)
    for setting in settings:
        field, value = _setting("--set", setting)
        _check_place("--set", field)
        changes[field] = value
    if not changes:
        return Project(path, written, written, environment)
    for field, value in changes.items():
        _put(tables, field, value)
    return Project(path, _sections(tables), written, environment)


def _sections(tables: dict[str, Any]) -> ProjectSections:
    if "version" not in tables:
        raise UsageError("version", "is required", "begin the file with version = 1")
    for field, value in _leaves((), tables):
        if "\0" in "".join((*field, *_texts(value))):
            raise UsageError(
                ".".join(field).replace("\0", ""),
                "has a NUL character, which no name and no path has",
                "remove \\u0000",
            )
    return decoded(tables, ProjectSections)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value that is no table."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else ():
        yield from (text for _, one in _leaves((), part) for text in _texts(one))


def decoded(tables: Any, kind: type[Struct], where: str = "") -> Struct:
    """Convert parsed TOML to a struct.

    Args:
        where: the field of the project file that has it.

    Raises:
        UsageError: an unknown field, a missing one, or a value of another type.
    """
    try:
        return msgspec.convert(tables, kind)
    except msgspec.ValidationError as error:
        raise_decode_error(error, kind, tables, where)


def _check_names(sections: ProjectSections) -> None:
    for kind in ("data_set", "table", "job", "workload", "census", "env"):
        for name in getattr(sections, kind):
            check_name(kind, name)


#: The names of a field of the project file, from the outermost table on.
_Field = tuple[str, ...]


def _leaves(field: _Field, value: Any) -> Iterable[tuple[_Field, Any]]:
    """Yield the fields of an environment with their values."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves((*field, name), part)
    else:
        yield field, value


def _setting(option: str, text: str) -> tuple[_Field, Any]:
    """Parse ``FIELD=VALUE``; both are TOML, or a text without quotes."""
    written, equals, value = text.partition("=")
    try:
        fields = [field for field, _ in _leaves((), tomllib.loads(f"{written} = 0"))]
    except tomllib.TOMLDecodeError:
        fields = [tuple(written.strip().split("."))]
    field = fields[0] if fields else ()
    if not equals or len(field) < 3:
        raise UsageError(option, "is not FIELD=VALUE", "write it like job.daily.store=daily.db")
    try:
        return field, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return field, value


def _check_place(where: str, field: _Field) -> None:
    if len(field) < 3 or not _is_place(field):
        raise UsageError(
            where,
            f"{'.'.join(field)} is not a place: an environment changes where data, secret, store, "
            "account and releases are, never what a plan promises",
            "change it in the file itself, or look at it with `dpstream plan --try`",
        )


def _is_place(field: _Field) -> bool:
    """Return whether a field of the file, or a table that it is in, is declared as a place."""
    kind: Any = ProjectSections
    if field[0] == "job":
        from dpstream.pipelines.project.job_section import JobSection  # loads the mathematics

        kind, field = JobSection, field[2:]
    for name in field:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            continue
        hint = get_type_hints(kind, include_extras=True).get(name) if _is_struct(kind) else None
        options = [hint, *get_args(hint)]
        if any(PLACE in getattr(option, "__metadata__", ()) for option in options):
            return True
        kind = next((o for o in options if _is_struct(o) or get_origin(o) is dict), None)
    return False


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _put(tables: dict[str, Any], field: _Field, value: Any) -> None:
    """Write a value at a field of decoded TOML."""
    *parents, last = field
    if parents[1] not in _tables(tables.get(parents[0])):
        raise UsageError(
            ".".join(field), f"no {parents[0]} '{parents[1]}' in {PROJECT_FILE}", "correct the name"
        )
    table = tables
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UsageError(".".join(field), "is in no table", "correct the field")
    table[last] = value


def _tables(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def write_project(path: Path, text: str, before: bytes) -> None:
    """Write a project file.

    Args:
        path: the file's absolute path.
        text: the text of the whole file; a byte order mark of the file before stays.
        before: the file's text when ``text`` was made from it; empty: there was no file.

    Raises:
        PolicyError: the file has another text now.
        RunError: the operating system cannot write it.
    """
    changed = PolicyError(
        path.name, "was changed by another program meanwhile", "run the command again"
    )
    with file_errors(path.name, "cannot be written"):
        if not before:
            if not put_once(path, text.encode()):
                raise changed
            return
        mark = codecs.BOM_UTF8 if before.startswith(codecs.BOM_UTF8) else b""
        path = path.resolve()  # a link to the file stays one
        mode = stat.S_IMODE(path.stat().st_mode)
        with replacing(path, mode) as draft:
            draft.chmod(mode)  # also what the umask takes away
            draft.write_bytes(mark + text.removeprefix("\ufeff").encode())
            if path.read_bytes() != before:
                raise changed


def flush_project(path: Path) -> None:
    """Flush a project file to disk that already has the text a command would write.

    An earlier command that wrote it may have stopped before the file was on disk.

    Raises:
        RunError: the operating system cannot flush it.
    """
    with file_errors(path.name, "cannot be written"):
        path = path.resolve()
        sync(path)
        sync(path.parent)


def unit_of(project: Project, name: str, used_by: str, unit_name: str = "user") -> UnitSection:
    """Return the unit of a data set.

    Args:
        used_by: a text for errors: what needs a unit.
        unit_name: the name of the unit that the error proposes.

    Raises:
        UsageError: the data set has no unit.
    """
    unit = project.sections.data_set[name].unit
    if unit is None:
        fix = f'add unit = {{ name = "{unit_name}", type = "string" }} to [data_set.{name}]'
        table = _session_table(project, name)
        if table is not None:
            fix = f"ask table {table} in SQL alone, or name a data set with a unit"
        raise UsageError(f"data_set.{name}.unit", f"is required by {used_by}", fix)
    return unit


def account_of(project: Project, name: str, to_make: bool = False) -> AccountPlace:
    """Return the account of a data set, a file by its absolute path; it need not exist.

    Args:
        to_make: a data set without an account gets the path ``NAME.account.db``; without an id,
            the id is empty.

    Raises:
        UsageError: the data set names no account, or its path or id cannot be used.
    """
    section = project.sections.data_set[name]
    account, where = section.account, f"data_set.{name}"
    if account is None:
        if not to_make:
            raise UsageError(
                f"{where}.account",
                "is required: an answer is charged before a row is read",
                _making(project, name),
            )
        account = AccountSection(f"{name}.account.db")
    if account.id is None and not to_make:
        raise UsageError(f"{where}.account.id", "is required", _making(project, name))
    unit = None if section.unit is None else section.unit.name
    with _located(where):
        for field, text in (("account.path", account.path), ("unit.name", unit)):
            if text is not None and (not text or "\0" in text):
                raise UsageError(field, "must not be empty", "write a name")
        check_names(name, account.id)
        place = place_below(project.folder, account.path)
        tables = _tables_of(project, name).values()
        columns = sorted({table.unit_column for table in tables if table.unit_column})
        file = str(project.path)
        return AccountPlace(place, name, account.id or "", unit, file, tuple(columns))


def _making(project: Project, name: str) -> str:
    """Return the command that makes the account of a data set."""
    if project.sections.data_set[name].unit is not None:
        return "make one with `dpstream account create`, which prints the line"
    table = _session_table(project, name) or "TABLE"
    return f"make it with `dpstream table init {table}`, which writes the line"


def is_session_table(table: TableSection) -> bool:
    """Return whether each record of a table has its own budget."""
    return bool(table.dimension)


def _session_table(project: Project, data_set: str) -> str | None:
    """Return the name of a data set's table whose records have their own budgets, if any."""
    tables = _tables_of(project, data_set)
    return next((name for name, table in tables.items() if is_session_table(table)), None)


def _tables_of(project: Project, data_set: str) -> dict[str, TableSection]:
    """Return the tables of a data set: those that name it, and if it is the only one, all."""
    only = len(project.sections.data_set) == 1
    tables = project.sections.table.items()
    return {n: table for n, table in tables if (table.data_set or (only and data_set)) == data_set}


def secret_of(project: Project, name: str) -> SecretSource:
    """Return the reference to a data set's secret, a file by its absolute path; nothing is read.

    Raises:
        UsageError: the secret is given twice, or its path cannot be used.
    """
    section = project.sections.data_set[name]
    with _located(f"data_set.{name}"):
        source = SecretSource(section.secret, section.insecure_test_secret)
        return source.below(project.folder)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Rewrite errors about a part so that they name the field of the project file."""
    try:
        yield
    except DpstreamError as error:
        raise type(error)(f"{where}.{error.field}", error.rule, error.fix) from None
