"""Reads a section of declared fields from YAML, strictly, with the line of every mistake.

YAML as it is usually loaded hides mistakes: a duplicate key silently wins, ``1:30`` is ninety, ``010`` is
eight, ``no`` is false, a merge key or an alias changes a field far away, and a few lines of aliases fill the
memory. The rules here:

* The text is bounded in size, in events and in depth, checked on the flat event stream before anything
  recursive runs.
* Anchors, aliases, explicit tags and merge keys are refused: a policy is read by people at night.
* Plain scalars mean what they mean in YAML 1.2 (JSON's numbers, ``true`` and ``false``, ``null``); the rest
  is text.
* All mistakes are reported in one message, in the order of their lines, each with line, field, value, remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import yaml

from lmres.errors import ConfigError
from lmres.fields import FieldError, Section, Spec, nearest_name, shown, specs

MAX_CHARS = 256 * 1024
MAX_EVENTS = 20_000
MAX_DEPTH = 16
MAX_REPORTED = 20
MAX_DIGITS = 40

_TAG = "tag:yaml.org,2002:"
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9]")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")

AnySection = TypeVar("AnySection", bound=Section)


class _Loader(yaml.SafeLoader):
    """Resolves no plain scalar by itself: ``_scalar`` does, by the rules above."""


_Loader.yaml_implicit_resolvers = {}


class StrictDumper(yaml.SafeDumper):
    """Writes what both this reader and any YAML 1.1 reader take back as the same values."""


# PyYAML's own rule asks for a dot in a float: it would leave the text "1e3" without quotes.
StrictDumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


def read_section(text: str, section: type[AnySection], *, source: str) -> AnySection:
    """Reads one document that holds the section; raises ConfigError with every problem found."""
    reader = _Reader()
    built: Section | None = None
    try:
        root = _compose(text, reader)
        if root is not None and not reader.problems:
            built = _read_root(root, section, reader)
    except yaml.MarkedYAMLError as error:
        reader.add(
            _mark_line(error.problem_mark or error.context_mark),
            f"not YAML: {error.problem or error.context}",
        )
    except yaml.reader.ReaderError as error:
        line = len(_BREAK.findall(text[: max(error.position, 0)])) + 1
        reader.add(line, f"not YAML: {error.reason} (character U+{int(error.character):04X})")
    except (ValueError, OverflowError, IndexError) as error:
        # PyYAML's scanner lets these escape, for example for the escape "\UFFFFFFFF".
        reader.add(1, f"not YAML: {error}")
    if built is None or reader.problems:
        raise ConfigError(reader.message(source))
    return cast(AnySection, built)


@dataclass(slots=True)
class _Reader:
    problems: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, text: str) -> None:
        self.problems.append((line, text))

    def message(self, source: str) -> str:
        found = sorted(self.problems, key=lambda problem: problem[0])
        head = f"policy {source}: {len(found)} problem{'s' if len(found) != 1 else ''}"
        lines = [f"  line {line}: {text}" for line, text in found[:MAX_REPORTED]]
        if len(found) > MAX_REPORTED:
            lines.append(f"  and {len(found) - MAX_REPORTED} more; correct these first")
        return "\n".join([head, *lines])


def _compose(text: str, reader: _Reader) -> yaml.Node | None:
    """The node graph of the only document, or None after adding why there is none."""
    if len(text) > MAX_CHARS:
        reader.add(1, f"found {len(text)} characters; allowed: at most {MAX_CHARS}")
        return None
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        line = _mark_line(event.start_mark)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH or number > MAX_EVENTS:
            limit = f"deeper than {MAX_DEPTH} levels" if depth > MAX_DEPTH else f"more than {MAX_EVENTS} items"
            reader.add(line, f"found {limit}; a policy is a small tree: remove what does not belong to it")
            return None
        if isinstance(event, yaml.AliasEvent):
            reader.add(line, f"found the alias *{event.anchor}; allowed: plain values only, write the value out")
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            if event.anchor is not None:
                reader.add(line, f"found the anchor &{event.anchor}; allowed: plain values only, remove it")
            if event.tag is not None:
                reader.add(line, f"found the tag {shown(event.tag)}; allowed: plain values only, remove it")
    root = yaml.compose(text, Loader=_Loader) if not reader.problems else None
    if not reader.problems and (root is None or (isinstance(root, yaml.ScalarNode) and _scalar(root) is None)):
        reader.add(1, "the document is empty; write at least 'schema_version: 1'")
    return root


def _read_root(root: yaml.Node, section: type[Section], reader: _Reader) -> Section | None:
    if not isinstance(root, yaml.MappingNode):
        reader.add(
            _line(root),
            f"found {_node_shown(root)}; allowed: a mapping of fields such as 'schema_version: 1'",
        )
        return None
    present = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
    for name, spec in specs(section).items():
        if spec.required and not isinstance(spec.holds, type):
            if name not in present:
                reader.add(_line(root), f"{name}: missing; add '{name}: {spec.holds.allowed()}'")
                continue
            # A document of another version has other fields: listing them as unknown would hide the cause.
            _read_field(present[name], spec, name, reader)
            if reader.problems:
                return None
    return _read_mapping(root, section, "", reader)


def _read_mapping(node: yaml.MappingNode, section: type[Section], prefix: str, reader: _Reader) -> Section | None:
    declared = specs(section)
    values: dict[str, object] = {}
    lines: dict[str, int] = {}
    before = len(reader.problems)
    for key_node, value_node in node.value:
        line = _line(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            reader.add(
                line,
                f"{prefix or 'the document'}: found {_node_shown(key_node)} as a field name; allowed: "
                f"{', '.join(declared)}",
            )
            continue
        name = key_node.value
        if name == "<<" and key_node.style is None:
            reader.add(line, f"{prefix}<<: found a merge key; allowed: plain fields only, write the fields out")
        elif name in lines:
            reader.add(line, f"{prefix}{_name_shown(name)}: given twice, first in line {lines[name]}; remove one")
        elif name not in declared:
            lines[name] = line
            reader.add(
                line,
                f"{prefix}{_name_shown(name)}: unknown field with value {_node_shown(value_node)}; "
                f"{nearest_name(name, declared)}",
            )
        else:
            lines[name] = line
            values[name] = _read_field(value_node, declared[name], f"{prefix}{name}", reader)
    if len(reader.problems) > before:
        return None
    try:
        return section(**values)
    except FieldError as error:
        for name, problem in error.problems:
            line = lines.get(name.split(".")[0], _line(node))
            reader.add(line, f"{prefix}{name}: {problem}")
        return None


def _read_field(node: yaml.Node, spec: Spec, path: str, reader: _Reader) -> object:
    """The checked value of one field; None after adding a problem."""
    if isinstance(spec.holds, type):
        if isinstance(node, yaml.MappingNode):
            return _read_mapping(node, spec.holds, f"{path}.", reader)
        reader.add(
            _line(node),
            f"{path}: found {_node_shown(node)}; allowed: a mapping of {', '.join(specs(spec.holds))}; "
            f"remove the line for the defaults",
        )
        return None
    try:
        if isinstance(node, yaml.ScalarNode):
            return spec.holds.check(_scalar(node))
        if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return spec.holds.check([_scalar(item) for item in node.value])
    except ValueError as refused:
        reader.add(_line(node), f"{path}: {refused}")
        return None
    reader.add(_line(node), f"{path}: found {_node_shown(node)}; allowed: {spec.holds.allowed()}")
    return None


def _scalar(node: yaml.ScalarNode) -> object:
    """The value of a scalar; ValueError for a number too long to be meant."""
    text: str = node.value
    if node.style is not None:
        return text
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if not _FLOAT.match(text) or _LEADING_ZERO.match(text):
        return text
    if len(text) > MAX_DIGITS:
        raise ValueError(f"found {shown(text)}; allowed: a number of at most {MAX_DIGITS} characters")
    return int(text) if _INT.match(text) else float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _line(node: yaml.Node) -> int:
    return _mark_line(node.start_mark)


def _mark_line(mark: Any) -> int:
    return int(mark.line) + 1 if mark is not None else 1


def _name_shown(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 64 else shown(name)


def _node_shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if not isinstance(node, yaml.ScalarNode):
        return "something that is no value"
    text = shown(node.value)
    return text[1:-1] if node.style is None and node.value and text[1:-1] == node.value else text
