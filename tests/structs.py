"""Every field inside a struct, for tests that a digest covers each of them."""

from typing import Any

import msgspec


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all fields inside a value's structs and of the entries of its tuples."""
    if isinstance(value, msgspec.Struct):
        inside: list[tuple[Any, Any]] = [
            (name, getattr(value, name)) for name in value.__struct_fields__
        ]
    elif isinstance(value, tuple):
        inside = list(enumerate(value))
    else:
        return [path]
    return [leaf for name, part in inside for leaf in leaves(part, (*path, name))]


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """The value with what stands at the path replaced by something else of its type."""
    if not path:
        if isinstance(value, dict):
            return value | {"more": "BOOL"}
        return value + 1 if type(value) in (int, float) else f"{value}?"
    name, rest = path[0], path[1:]
    if isinstance(value, tuple):
        return (*value[:name], changed(value[name], rest), *value[name + 1 :])
    return msgspec.structs.replace(value, **{name: changed(getattr(value, name), rest)})
