"""A function's signature as a pattern of calls. Pure: what an argument's value is, the caller knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Value = TypeVar("Value")


class Unbound(Exception):
    """The call does not fit the signature; the message says why."""


@dataclass(frozen=True)
class Parameter:
    name: str
    star: str = ""
    """``*`` and ``**`` for those that take the rest."""
    positional: bool = True
    keyword: bool = True
    default: str | None = None
    """Its source; None where every call must give the argument."""

    @property
    def required(self) -> bool:
        return self.default is None and not self.star


@dataclass(frozen=True)
class Signature:
    function: str
    """Its dotted name; of a method of any receiver, the method's."""
    receiver: str | None
    awaited: bool
    parameters: tuple[Parameter, ...]

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


@dataclass(frozen=True)
class Argument(Generic[Value]):
    value: Value
    star: Literal["", "*", "**"] = ""
    keyword: str | None = None


PATTERN = re.compile(
    r"(?P<await>await\s+)?(?:\$(?P<receiver>\w+)\.)?(?P<function>[^\W\d][\w.]*)\((?P<parameters>.*)\)", re.DOTALL
)


def parse_signature(text: str) -> Signature:
    """Of ``a.b.f(x, y=None, *rest)``, ``$self.f(x)`` or ``await f(x)``. ValueError says what is wrong."""
    parts = PATTERN.fullmatch(text.strip())
    if not parts:
        raise ValueError(f"{text!r} is no signature; write it as module.function(parameter, optional=default, *rest)")
    try:
        code = f"def f({parts['parameters']}): ..."
        node = ast.parse(code).body[0]
    except SyntaxError as fault:
        raise ValueError(f"{text!r} is no signature: {fault.msg}") from fault
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [
        ast.get_source_segment(code, value) for value in given.defaults
    ]
    found = [
        Parameter(argument.arg, keyword=argument not in given.posonlyargs, default=default)
        for argument, default in zip(plain, defaults, strict=True)
    ]
    if given.vararg:
        found.append(Parameter(given.vararg.arg, star="*"))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(
            Parameter(argument.arg, positional=False, default=ast.get_source_segment(code, value) if value else None)
        )
    if given.kwarg:
        found.append(Parameter(given.kwarg.arg, star="**"))
    return Signature(parts["function"], parts["receiver"], bool(parts["await"]), tuple(found))


def bind(signature: Signature, arguments: Iterable[Argument[Value]]) -> Mapping[str, Sequence[Argument[Value]]]:
    """The arguments of a call by parameter, as Python would bind them; a parameter that the call does not give is missing.

    Unbound where they do not fit, or where ``*x`` or ``**x`` in the call leaves open what they fill.
    """
    bound: dict[str, list[Argument[Value]]] = {}
    places = [p for p in signature.parameters if p.positional and not p.star]
    rest = {p.star: p.name for p in signature.parameters if p.star}
    for argument in arguments:
        named = signature.parameter(argument.keyword) if argument.keyword else None
        if argument.star == "**" or (argument.keyword and not (named and named.keyword and not named.star)):
            open_ones = [p.name for p in signature.parameters if p.name not in bound and not p.star]
            if argument.star and open_ones:
                raise Unbound(f"a ** argument may hold {open_ones[0]}")
            name = rest.get("**")
        elif named:
            name = named.name
        elif argument.star and places:
            raise Unbound(f"a * argument may hold {places[0].name}")
        else:
            name = places.pop(0).name if places else rest.get("*")
        if name is None:
            raise Unbound(f"the signature has no parameter for {argument.keyword or 'its last arguments'}")
        if name in bound and name not in rest.values():
            raise Unbound(f"{name} is given twice")
        bound.setdefault(name, []).append(argument)
        places = [p for p in places if not (named and p.name == named.name)]
    for parameter in signature.parameters:
        if parameter.required and parameter.name not in bound:
            raise Unbound(f"{parameter.name} is missing")
    return bound
