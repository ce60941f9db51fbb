# noqa: INP001 - a script, not a package
"""Writes the pages of docs/reference that repeat the code: pipeline-file.md and errors.md.

Run by hand: `python docs/generate.py`. Names, types, defaults, actions and severities come from the code; what a key
means and what repairs an error is in `meanings.yaml`, which must have an entry for each and no other.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import annotated_types
import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from anabranch import pipeline
from anabranch_schemas.errors import AnabranchError

DOCS = Path(__file__).parent
ROOMS = ("anabranch_schemas", "anabranch_connectors", "anabranch_source", "anabranch_sink", "anabranch")
MODELS: Mapping[str, type[BaseModel]] = {
    "Top level": pipeline.Pipeline,
    "registry": pipeline.Registry,
    "sites[]": pipeline.Site,
    "sources[]": pipeline.Source,
    "sources[].snapshot": pipeline.Snapshot,
    "sources[].topics": pipeline.Topics,
    "sinks[]": pipeline.Sink,
    "sinks[].spark": pipeline.Spark,
}
_GENERATED = "<!-- Written by docs/generate.py: change the code or docs/meanings.yaml and run it again. -->\n"
_PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", SecretStr: "text, secret"}


class StaleMeaningsError(Exception):
    """`meanings.yaml` lacks an entry, or has one that the code does not know."""


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """One finding of `anabranch check`, as the code writes it."""

    code: str
    severity: str
    message: str
    repair: str


def pages() -> dict[Path, str]:
    """Return path → text of the generated pages.

    Raises:
        StaleMeaningsError: if `meanings.yaml` and the code disagree.
    """
    meanings = yaml.safe_load((DOCS / "meanings.yaml").read_text(encoding="utf-8"))
    reference = DOCS / "reference"
    return {
        reference / "pipeline-file.md": _pipeline_page(meanings["pipeline"], meanings["pipeline_intro"]),
        reference / "errors.md": _errors_page(meanings["repairs"], meanings["errors_intro"]),
    }


def _pipeline_page(meanings: Mapping[str, Mapping[str, str]], intro: str) -> str:
    _agree("pipeline", set(meanings), set(MODELS))
    parts = [_GENERATED, "# Pipeline file\n", intro]
    for title, model in MODELS.items():
        keys = {field.alias or name: field for name, field in model.model_fields.items()}
        _agree(title, set(meanings[title]), set(keys))
        rows = [(f"`{key}`", _type(field), _default(field), meanings[title][key]) for key, field in keys.items()]
        parts += [f"## {title}\n", _table(("key", "type", "default", "meaning"), rows)]
    return "\n".join(parts)


def _errors_page(repairs: Mapping[str, str], intro: str) -> str:
    classes = {kind.code: kind for kind in _errors()}
    _agree("repairs", set(repairs), set(classes))
    rows = [
        (f"`{code}`", _first_paragraph(kind), kind.action.value, repairs[code])
        for code, kind in sorted(classes.items())
    ]
    found = [(f"`{f.code}`", f.severity, f.message, f.repair) for f in sorted(set(_findings()))]
    parts = [_GENERATED, "# Errors and findings\n", intro, "## Errors\n"]
    parts += [_table(("code", "meaning", "action", "repair"), rows), "## Findings of `anabranch check`\n"]
    parts += ["A check may also report any of the errors above. `…` stands for a name or number.\n"]
    parts += [_table(("code", "severity", "message", "repair"), found)]
    return "\n".join(parts)


def _errors() -> Iterator[type[AnabranchError]]:
    """Yield every error class with a code of its own, whatever room it lives in."""
    for room in ROOMS:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    todo: list[type[AnabranchError]] = [AnabranchError]
    while todo:
        kind = todo.pop()
        if "code" in vars(kind) and kind.__module__.partition(".")[0] in ROOMS:
            yield kind
        todo += kind.__subclasses__()


def _findings() -> Iterator[Found]:
    """Yield every finding that is written out in the code: `Finding(…)`, or `_error(…)` of a checking module."""
    for room in ROOMS:
        for place in importlib.import_module(room).__path__:
            for path in sorted(Path(place).rglob("*.py")):
                text = path.read_text(encoding="utf-8")
                if "Finding(" in text:
                    yield from _findings_in(ast.parse(text))


def _findings_in(tree: ast.Module) -> Iterator[Found]:
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in {"Finding", "_error"} or not isinstance(call.args[0], ast.Constant):
            continue
        rest = call.args[1:] if name == "_error" else call.args[2:]
        severity = "error" if name == "_error" else _severity(call.args[1])
        written = [_text(_assigned(arg, texts)) for arg in rest[1:3]]
        yield Found(str(call.args[0].value), severity, written[0], written[1] if len(written) > 1 else "")


def _assigned(node: ast.expr, texts: list[ast.Assign]) -> ast.expr:
    """Return what a local name was last set to before it is used; anything else as it is."""
    if not isinstance(node, ast.Name):
        return node
    before = [a for a in texts if ast.unparse(a.targets[0]) == node.id and a.lineno < node.lineno]
    return max(before, key=lambda a: a.lineno).value if before else node


def _severity(node: ast.expr) -> str:
    """Return the severity, or both where the code chooses."""
    names = [part.attr.lower() for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return " or ".join(sorted({name for name in names if name in {"error", "warning", "info"}}))


def _text(node: ast.expr) -> str:
    """Return a string expression as text, `…` for what only a run knows."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
        case ast.IfExp():
            return f"{_text(node.body)}; or {_text(node.orelse)}"
        case ast.Name(id="BOOTSTRAP"):
            return "run `anabranch bootstrap FILE --source NAME`"
        case _:
            return "…"


def _type(field: FieldInfo) -> str:
    bounds = {
        annotated_types.Ge: ("at least", "ge"),
        annotated_types.Gt: ("more than", "gt"),
        annotated_types.Le: ("at most", "le"),
        annotated_types.MinLen: ("at least", "min_length"),
    }
    limits = [f"{bounds[type(m)][0]} {getattr(m, bounds[type(m)][1])}" for m in field.metadata if type(m) in bounds]
    patterns = [f"`{pattern}`" for m in field.metadata if (pattern := getattr(m, "pattern", None))]
    return ", ".join([_type_name(field.annotation), *limits, *patterns]).replace("|", "\\|")


def _type_name(annotation: Any) -> str:
    """Return a type as users of YAML call it; models are mappings with a section of their own."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_type_name(one) for one in arguments if one is not type(None))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping {_type_name(arguments[0])} → {_type_name(arguments[1])}"
    return _PLAIN.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "–"
    if value is None or value in ({}, ()):
        return "none"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(repr, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _first_paragraph(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _agree(where: str, written: set[str], known: set[str]) -> None:
    if written != known:
        raise StaleMeaningsError(
            f"meanings.yaml, {where}: missing {sorted(known - written)}, unknown {sorted(written - known)}"
        )


if __name__ == "__main__":
    for page, content in pages().items():
        page.write_text(content, encoding="utf-8")
