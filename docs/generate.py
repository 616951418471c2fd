"""What pages of the reference say, made from the code when the site is built: it cannot go stale.

A page has ``<!-- generate: NAME -->`` where the text of that name goes.  MkDocs calls
``on_page_markdown`` and ``on_files`` (see `hooks` in mkdocs.yml).  Where the code moves, only
``HOMES`` changes.
"""

import ast
import functools
import importlib
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

#: What the pages are made from: module and name.
HOMES = {
    "command": ("dpstream.pipelines.cli.main", "cli"),
    "project file": ("dpstream.pipelines.project.sections", "ProjectSections"),
    "job": ("dpstream.pipelines.project.job_section", "JobSection"),
    "mechanism": ("dpstream.accounting.plan.privacy", "MechanismFields"),
    "release": ("dpstream.dp_transforms.batches", "release_schema"),
    "metrics": ("dpstream.pipelines.operate.metrics", "METRICS"),
    "due metrics": ("dpstream.pipelines.operate.metrics", "DUE_METRICS"),
    "errors": ("dpstream.accounting.errors", "DpstreamError"),
    "example": ("dpstream.pipelines", "examples/flights.toml"),
}
ROOT = Path(__file__).parents[1]
#: Packages below `dpstream`, in the order in which they may import each other.
ROOMS = ("accounting", "state", "dp_transforms", "pipelines")
#: What the columns that every release has mean.
RELEASE_COLUMNS = {
    "release_id": "Name of the value: a keyed digest of run, window, trigger and key. A value that "
    "is written again has the same one.",
    "window_start": "First instant of the window.",
    "window_end": "First instant after the window.",
    "trigger": "Step index in the window, 1 .. T. The last one is the window's final value.",
    "trigger_time": "The trigger time: what the value says is true of records stamped before it.",
    "plan_hash": "Digest of every public parameter of the job.",
    "run_id": "Random name of the run. `INSECURE-` in front: a fixed test secret was used; "
    "`UNSOUND-`: a comparison with numbers that have no guarantee.",
}


def found(what: str) -> Any:
    """The object of a page."""
    module, name = HOMES[what]
    return getattr(importlib.import_module(module), name)


def table(header: str, rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; bars and line breaks in cells are made harmless."""
    heads = header.split("|")
    lines = [heads, ["---"] * len(heads)]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in [*lines, *cells])


def cli() -> str:
    """Commands and flags, by mkdocs-click."""
    module, name = HOMES["command"]
    return (
        f"::: mkdocs-click\n    :module: {module}\n    :command: {name}\n"
        "    :prog_name: dpstream\n    :depth: 1\n    :style: plain\n"
    )


def api() -> str:
    """Everything that ``import dpstream`` offers, by mkdocstrings."""
    face = importlib.import_module("dpstream")
    parts = []
    for name in face.__all__:
        thing = getattr(face, name)
        parts.append(f"::: {thing.__module__}.{thing.__qualname__}\n")
    return "\n".join(parts)


def words_of(schema: dict[str, Any]) -> str:
    """A type of the JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[table](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(words_of(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if schema.get("type") == "array":
        inner = schema.get("items") or {}
        if "prefixItems" in schema:
            return "[" + ", ".join(words_of(s) for s in schema["prefixItems"]) + "]"
        return f"list of {words_of(inner)}" if inner else "list"
    if schema.get("type") == "object":
        return "table of names"
    return str(schema.get("type", "any"))


def attributes(text: str) -> dict[str, str]:
    """Field -> its words, from the `Attributes:` of a docstring."""
    _, _, body = inspect.cleandoc(text).partition("Attributes:\n")
    out: dict[str, str] = {}
    names: list[str] = []
    for line in body.splitlines():
        if line and not line.startswith("    "):
            break
        start = re.match(r"    ([a-z_, ]+): (.*)", line)
        if start:
            names = start[1].split(", ")
            out |= dict.fromkeys(names, start[2])
        else:
            out |= {name: f"{out[name]} {line.strip()}" for name in names}
    return out


def project_schema() -> dict[str, Any]:
    """JSON schema of the project file."""
    schemas, definitions = msgspec.json.schema_components(
        [found("project file"), found("job")], ref_template="#/$defs/{name}"
    )
    root = schemas[0]["$ref"].rsplit("/", 1)[1]
    # A job is decoded where it is asked for.
    definitions[root]["properties"]["job"]["additionalProperties"] = schemas[1]
    return schemas[0] | {"$defs": definitions}


@functools.cache
def meanings() -> dict[str, dict[str, str]]:
    """Words for fields of the project file by table, beside those of the docstrings."""
    return tomllib.loads((ROOT / "docs/reference/project-file.toml").read_text())


def struct_table(definition: dict[str, Any], written: str) -> str:
    """The fields of one table of the project file; ``written`` is its name there."""
    words = attributes(definition.get("description", ""))
    if written == "job.NAME.mechanism":  # declared with the plan
        words |= attributes(found("mechanism").__doc__)
    words |= meanings().get(written, {})
    required = set(definition.get("required", ()))
    rows = []
    for name, field in definition["properties"].items():
        default = field.get("default")
        given = "" if default in (None, "", {}, []) else f"`{json.dumps(default)}`"
        rows.append(
            (f"`{name}`", words_of(field), "required" if name in required else given,
             re.sub(r"``", "`", words.get(name, "")))
        )  # fmt: skip
    return table("field|type|default|meaning", rows)


def written_names(root: dict[str, Any], definitions: dict[str, Any]) -> dict[str, str]:
    """Struct -> the dotted name of its table in the file (the first, where it has several)."""
    names: dict[str, str] = {}

    def visit(properties: dict[str, Any], before: str) -> None:
        for key, field in properties.items():
            for ref in re.findall(r"#/\$defs/(\w+)", json.dumps(field)):
                if ref not in names:
                    names[ref] = before + key + (".NAME" if _is_named(field) else "")
                    visit(definitions[ref].get("properties", {}), f"{names[ref]}.")

    visit(root["properties"], "")
    return names


def _is_named(field: dict[str, Any]) -> bool:
    """Whether the field holds tables by names that the file's writer chooses."""
    return "$ref" in (field.get("additionalProperties") or {})


def project_file() -> str:
    """Sections and fields of the project file, from the JSON schema of its structs."""
    schema = project_schema()
    definitions = schema["$defs"]
    root = definitions.pop(schema["$ref"].rsplit("/", 1)[1])
    names = written_names(root, definitions)
    parts = ["## Top level\n", struct_table(root, "top")]
    for name, definition in definitions.items():
        if "properties" not in definition:
            continue
        written = names[name]
        title = f"`[{written}]`" if written.count(".") == 1 else f"`{written}`"
        summary = inspect.cleandoc(definition.get("description", "")).split("Attributes:")[0]
        meaning = meanings()["top"].get(written)
        plain = (
            f"{meaning[0].upper()}{meaning[1:]}." if meaning else summary.replace("``", "`").strip()
        )
        fields = struct_table(definition, written)
        parts.append(f"## {title} {{#{name.lower()}}}\n\n{plain}\n\n{fields}")
    parts.append(
        "## Schema\n\n[dpstream.schema.json](dpstream.schema.json) is the JSON schema of all this, "
        "for editors that check TOML.\n"
    )
    return "\n".join(parts)


def release_schema() -> str:
    """Columns of a release, of the example job."""
    import dpstream

    module, example = HOMES["example"]
    with resources.as_file(resources.files(module).joinpath(example)) as path:
        plan = dpstream.load_job(path).plan
    keys = {field.column for field in plan.key}
    rows = []
    for field in found("release")(plan):
        if field.name in keys:
            words = "A column of the key, as the job's `key` names it."
        elif field.name.endswith("_sd"):
            words = "Standard deviation of the noise in the column before it. Public."
        else:
            words = RELEASE_COLUMNS.get(field.name) or "A released value: an `aggregate`."
        rows.append((f"`{field.name}`", f"`{field.type}`", words))
    return table("column|Arrow type|meaning", rows)


def metrics() -> str:
    """The Prometheus metrics."""
    rows = [
        (f"`{m.name}`", m.kind, m.help_text) for m in (*found("metrics"), *found("due metrics"))
    ]
    return table("name|type|meaning", rows)


@functools.cache
def sources() -> dict[Path, ast.Module]:
    """Every module of the program, by its path below the package."""
    folder = Path(inspect.getfile(importlib.import_module("dpstream"))).parent
    files = sorted(path for room in ROOMS for path in (folder / room).rglob("*.py"))
    return {path.relative_to(folder): ast.parse(path.read_text()) for path in files}


def refusals() -> Iterator[tuple[str, str, str, str]]:
    """(class, field, rule, fix) of each coded error that the source spells out."""
    base = found("errors")
    kinds = {kind.__name__: kind for kind in base.__subclasses__()}
    for tree in sources().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in kinds and len(node.args) == 3:
                texts = [text_of(argument) for argument in node.args]
                if all(texts):
                    field, rule, fix = texts
                    yield node.func.id, field, rule, fix


def text_of(node: ast.expr) -> str:
    """The text of a literal; what a run fills in is shown as an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return ""


def exit_codes() -> str:
    """Classes of errors."""
    rows = [(f"`{k.kind}`", f"{k.exit_code}", f"`{k.__name__}`", k.__doc__ or "")
            for k in found("errors").__subclasses__()]  # fmt: skip
    return table("kind|exit code|class|meaning", rows)


def refused() -> str:
    """The refusals of the whole program by field."""
    codes = {k.__name__: k.exit_code for k in found("errors").__subclasses__()}
    rows = sorted({(f"`{field}`", str(codes[kind]), rule, fix)
                   for kind, field, rule, fix in refusals()})  # fmt: skip
    return table("field|exit code|rule|fix", rows)


def modules() -> str:
    """Every module by room, with the first sentence of its docstring."""
    parts = []
    for room in ROOMS:
        rows = []
        for path, tree in sources().items():
            name = path.as_posix().removesuffix(".py").removesuffix("/__init__")
            if path.parts[0] == room and name != room:
                words = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
                rows.append((f"`{name.removeprefix(room + '/')}`", words.replace("``", "`")))
        parts.append(f"### {room}\n\n{table('module|what', rows)}")
    return "\n".join(parts)


#: Name in a page -> what makes the text.
TEXTS: dict[str, Callable[[], str]] = {
    "commands": cli,
    "names": api,
    "sections": project_file,
    "columns": release_schema,
    "metrics": metrics,
    "exit codes": exit_codes,
    "refusals": refused,
    "modules": modules,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    return re.sub(r"<!-- generate: (.+?) -->", lambda mark: TEXTS[mark[1]](), markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the JSON schema of the project file to the site."""
    from mkdocs.structure.files import File

    schema = json.dumps(project_schema(), indent=1)
    files.append(File.generated(config, "reference/dpstream.schema.json", content=schema))
    return files
