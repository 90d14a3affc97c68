"""Declared fields: one description of a setting, from which its check, its default and its schema all follow.

A setting that is described twice drifts apart: the parser takes what the schema forbids, the documentation
names a default that is no longer true. Here a field is declared once, as the default of a dataclass field
(``number``, ``flag``, ``choice``, ``choices``, ``text``, ``section``). The rules:

* A ``Section`` checks itself when it is built, whoever builds it, and turns whole numbers into floats where a
  float is declared, so that equal settings are equal objects.
* ``bool`` is never a number, and no number is infinite or NaN: every declared number is bounded on both
  sides.
* A section may add rules between its fields (``cross_check``); they run only when each field holds by itself.
* An error says what was found and what is allowed; an unknown name is answered with the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, get_args

from lmres.errors import ConfigError

MAX_SHOWN_CHARS = 80
MAX_TEXT_CHARS = 4096
MAX_SECONDS = 1e8
MAX_COUNT = 2**31 - 1


class FieldError(ConfigError):
    """Some fields of a section are wrong: ``problems`` pairs each dotted field with what is wrong with it."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        ConfigError.__init__(self, "; ".join(f"{name}: {problem}" for name, problem in self.problems))


def shown(value: object) -> str:
    """A value as an error message shows it: one line, printable, bounded."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 256:
        # Python refuses to print an integer of many thousand digits.
        return "a whole number of more than 70 digits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def nearest_name(name: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest valid name, or all of them."""
    names = sorted(valid)
    # Bounded: the comparison is quadratic in the length of the name.
    near = difflib.get_close_matches(name[:MAX_SHOWN_CHARS].lower(), names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"valid here: {', '.join(names)}"


class Kind(Protocol):
    """What a field may hold. ``check`` returns the value in its normal form or raises ValueError."""

    def allowed(self) -> str: ...

    def check(self, value: object) -> object: ...

    def schema(self) -> dict[str, Any]: ...


def _refuse(value: object, kind: Kind) -> ValueError:
    return ValueError(f"found {shown(value)}; allowed: {kind.allowed()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A finite number between two bounds; ``above`` and ``below`` exclude the bound itself."""

    whole: bool
    minimum: float
    maximum: float
    above: bool = False
    below: bool = False
    words: tuple[str, ...] = ()

    def allowed(self) -> str:
        low = f"more than {self.minimum:.10g}" if self.above else f"from {self.minimum:.10g}"
        high = f"less than {self.maximum:.10g}" if self.below else f"at most {self.maximum:.10g}"
        number = f"a {'whole number' if self.whole else 'number'} {low}, {high}"
        return " or ".join([*(f"'{word}'" for word in self.words), number])

    def check(self, value: object) -> object:
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            raise _refuse(value, self)
        inside = self.minimum < value if self.above else self.minimum <= value
        inside = inside and (value < self.maximum if self.below else value <= self.maximum)
        if not inside or not math.isfinite(value):
            raise _refuse(value, self)
        return value if self.whole else float(value)

    def schema(self) -> dict[str, Any]:
        number: dict[str, Any] = {
            "type": "integer" if self.whole else "number",
            "exclusiveMinimum" if self.above else "minimum": self.minimum,
            "exclusiveMaximum" if self.below else "maximum": self.maximum,
        }
        return {"anyOf": [{"enum": list(self.words)}, number]} if self.words else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    value: int

    def allowed(self) -> str:
        return str(self.value)

    def check(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or value != self.value:
            raise _refuse(value, self)
        return value

    def schema(self) -> dict[str, Any]:
        return {"const": self.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    def allowed(self) -> str:
        return "true or false"

    def check(self, value: object) -> object:
        if not isinstance(value, bool):
            raise _refuse(value, self)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    words: tuple[str, ...]

    def allowed(self) -> str:
        return ", ".join(self.words)

    def check(self, value: object) -> object:
        if not isinstance(value, str) or value not in self.words:
            raise _refuse(value, self)
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A list of different words; kept as a tuple."""

    words: tuple[str, ...]

    def allowed(self) -> str:
        return f"a list, each at most once, of: {', '.join(self.words)}"

    def check(self, value: object) -> object:
        if not isinstance(value, (list, tuple)):
            raise _refuse(value, self)
        for word in value:
            if not isinstance(word, str) or word not in self.words:
                raise _refuse(word, self)
        if len(set(value)) != len(value):
            raise _refuse(list(value), self)
        return tuple(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"enum": list(self.words)}, "uniqueItems": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of printable text, or null."""

    def allowed(self) -> str:
        return "null or one line of printable text (in quotes if it looks like a number)"

    def check(self, value: object) -> object:
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_CHARS or not value.isprintable():
            raise _refuse(value, self)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_TEXT_CHARS}


@dataclass(frozen=True, slots=True)
class Section:
    """A group of declared fields. Checks itself; raises FieldError."""

    def __post_init__(self) -> None:
        problems: list[tuple[str, str]] = []
        for name, spec in specs(type(self)).items():
            value: object = getattr(self, name)
            if isinstance(spec.holds, type):
                if not isinstance(value, spec.holds):
                    problems.append((name, f"found {shown(value)}; allowed: a {spec.holds.__name__}"))
                continue
            try:
                object.__setattr__(self, name, spec.holds.check(value))
            except ValueError as refused:
                problems.append((name, str(refused)))
        if problems or (problems := list(self.cross_check())):
            raise FieldError(problems)

    def cross_check(self) -> Iterator[tuple[str, str]]:
        """Yields (field, problem) for rules between fields. Runs when every field holds by itself."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The declaration of one field: a kind of value, or a section of its own."""

    holds: Kind | type[Section]
    help: str
    required: bool = False


SectionType: TypeAlias = type[Section]


def specs(section: SectionType) -> dict[str, Spec]:
    """The declarations of a section's fields, in order."""
    return {field.name: field.metadata["spec"] for field in dataclasses.fields(section)}


def as_dict(section: Section) -> dict[str, Any]:
    """The section as plain dicts, lists and scalars."""
    out: dict[str, Any] = {}
    for name in specs(type(section)):
        value = getattr(section, name)
        if isinstance(value, Section):
            out[name] = as_dict(value)
        else:
            out[name] = list(value) if isinstance(value, tuple) else value
    return out


def json_schema(section: SectionType) -> dict[str, Any]:
    """The section's JSON Schema (draft 2020-12), without the rules between fields."""
    properties: dict[str, Any] = {}
    defaults = as_dict(section())
    for name, spec in specs(section).items():
        if isinstance(spec.holds, type):
            properties[name] = {"description": spec.help, **json_schema(spec.holds)}
        else:
            properties[name] = {"description": spec.help, **spec.holds.schema(), "default": defaults[name]}
    required = [name for name, spec in specs(section).items() if spec.required]
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": required} if required else schema


# The declarations return Any: to a type checker the field then has the type written beside it.


def _declare(kind: Kind | SectionType, default: object, text: str, required: bool = False) -> Any:
    metadata = {"spec": Spec(holds=kind, help=text, required=required)}
    return dataclasses.field(default=default, metadata=metadata)


def constant(value: int, text: str) -> Any:
    """A field that must be present and has one valid value."""
    return _declare(Constant(value=value), value, text, required=True)


def seconds(default: float | str, text: str, *, minimum: float = 0.0, words: tuple[str, ...] = ()) -> Any:
    """A duration."""
    return _declare(Number(whole=False, minimum=minimum, maximum=MAX_SECONDS, words=words), default, text)


def fraction(default: float, text: str) -> Any:
    """A number between 0 and 1, both excluded."""
    return _declare(Number(whole=False, minimum=0, maximum=1, above=True, below=True), default, text)


def factor(default: float, text: str, *, above: float, maximum: float) -> Any:
    return _declare(Number(whole=False, minimum=above, maximum=maximum, above=True), default, text)


def count(
    default: int | str, text: str, *, minimum: int = 1, maximum: int = MAX_COUNT, words: tuple[str, ...] = ()
) -> Any:
    """A whole number."""
    return _declare(Number(whole=True, minimum=minimum, maximum=maximum, words=words), default, text)


def flag(default: bool, text: str) -> Any:
    return _declare(Flag(), default, text)


def choice(literal: object, default: str, text: str) -> Any:
    """One of the words of a ``Literal`` type."""
    return _declare(Choice(words=get_args(literal)), default, text)


def choices(literal: object, default: tuple[str, ...], text: str) -> Any:
    """Any of the words of a ``Literal`` type."""
    return _declare(Choices(words=get_args(literal)), default, text)


def optional_text(text: str) -> Any:
    """A text that is absent by default."""
    return _declare(Text(), None, text)


def section(of: SectionType, text: str) -> Any:
    """A nested section with all its defaults."""
    return _declare(of, of(), text)
