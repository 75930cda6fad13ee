"""The schema seen as a flat list of keys: name, type, default and doc line of each.

``load.py`` builds the command line from it and the documentation is generated from it, so
a field added to ``schema.py`` appears in both. Knows nothing of YAML or argument parsing.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from megappo.config import schema


@dataclass(frozen=True)
class Key:
    """One configuration key. ``name`` is dotted (``actor.adam.lr``)."""

    name: str
    type: Any
    default: object
    doc: str


@dataclass(frozen=True)
class Group:
    """A key that only holds other keys (``actor``, ``actor.adam``)."""

    name: str
    doc: str


@cache
def _field_docs() -> dict[tuple[str, str], str]:
    """Doc line of each (class, field): the string literal that follows the field."""
    docs = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
                docs[node.name, field.target.id] = " ".join(str(text.value.value).split())
    return docs


def _walk(instance: Any, prefix: str) -> list[Key | Group]:
    cls = type(instance)
    hints = typing.get_type_hints(cls)
    found: list[Key | Group] = []
    for field in dataclasses.fields(cls):
        name, value = prefix + field.name, getattr(instance, field.name)
        doc = _field_docs()[cls.__name__, field.name]
        if dataclasses.is_dataclass(value):
            found += [Group(name, doc), *_walk(value, name + ".")]
        else:
            found.append(Key(name, hints[field.name], value, doc))
    return found


@cache
def entries() -> tuple[Key | Group, ...]:
    """All keys and groups in the schema's order, each group before its keys."""
    return tuple(_walk(schema.Config(), ""))


@cache
def keys() -> dict[str, Key]:
    """All keys by name, in the schema's order."""
    return {entry.name: entry for entry in entries() if isinstance(entry, Key)}


@cache
def groups() -> dict[str, Group]:
    """All groups by name, in the schema's order."""
    return {entry.name: entry for entry in entries() if isinstance(entry, Group)}


_NOUNS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


def describe(hint: Any) -> str:
    """A type in words, for errors and documentation: ``a number or null``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin is tuple:
        assert arguments[0] is float, hint
        return "a list of numbers" if ... in arguments else f"a list of {len(arguments)} numbers"
    return _NOUNS[hint]
