"""Tests and the code they test, in two sandboxes: objects of one are called from the other. Runs inside; standard library only.

    peer.py code WIRE              runs solution.py and answers for it
    peer.py tests WIRE REPORTS     runs the tests of tests.json, writes one JSON line a test

The wire is a socket, a JSON line a message. Plain values (numbers, texts, lists, dicts, ...) are copied, as Python's own types.
All else stays where it is and is spoken to through a Proxy. What a test compares with is never told to the code, and no object
of the code's takes part in a comparison or in arithmetic with a value of the test's: only proxies meet by their own operators.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import inspect
import json
import os
import socket
import sys
import types
from typing import Any

BY_TEXT: dict[str, tuple[type, Any, Any]] = {
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "str": (str, str.__str__, str),
    "int": (int, int.__index__, int),
    "float": (float, float.__float__, float),
}
SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
MUTABLE = (list, dict, set, bytearray, collections.deque)


def constant(value: Any) -> dict[str, Any] | None:
    """A value that holds no others, by what it is written as; None for all else."""
    for name, (kind, to, _) in BY_TEXT.items():
        if isinstance(value, kind):
            return {name: to(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (range, slice)):
        return {type(value).__name__: [value.start, value.stop, value.step]}
    if value is NotImplemented:
        return {"builtin": "NotImplemented"}
    name = value.__name__ if isinstance(value, type) else ""
    return {"builtin": name} if name and vars(builtins).get(name) is value else None


class Gone(BaseException):
    """The other side has ended. No test catches it by accident."""


class Peer:
    """One side of the wire. ``is_open``: the other side may do to what is here whatever it likes, else what is not refused."""

    def __init__(self, descriptor: int, is_open: bool) -> None:
        self.wire = socket.socket(fileno=descriptor).makefile("rwb")
        self.is_open = is_open
        self.kept: list[Any] = []  # objects that the other side knows by their number
        self.proxies: dict[int, Proxy] = {}
        self.exceptions: dict[str, type[BaseException]] = {}  # the other side's own, as they are raised here
        self.gone = False

    # values

    def encoded(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Proxy):
            return {"yours": object.__getattribute__(value, "_vime_number")}
        if isinstance(value, dict):
            return {"dict": [[self.encoded(k), self.encoded(v)] for k, v in dict.items(value)]}
        for name, kind in SEQUENCES.items():
            if isinstance(value, kind):
                return {name: [self.encoded(one) for one in kind.__iter__(value)]}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            is_array = bool(getattr(value, "shape", ()))
            return {"array": [value.dtype.str, value.tolist()]} if is_array else self.encoded(value.tolist())
        return constant(value) or {"mine": self.number(value)}

    def number(self, value: Any) -> int:
        """Under which the other side knows an object that stays here."""
        for number, one in enumerate(self.kept):
            if one is value:
                return number
        self.kept.append(value)
        return len(self.kept) - 1

    def decoded(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((name, inner),) = value.items()
        if name == "dict":
            return {self.decoded(k): self.decoded(v) for k, v in inner}
        if name in SEQUENCES:
            return SEQUENCES[name](map(self.decoded, inner))
        if name in BY_TEXT:
            return BY_TEXT[name][2](inner)
        if name == "complex":
            return complex(*inner)
        if name in ("range", "slice"):
            return {"range": range, "slice": slice}[name](*inner)
        if name == "array":
            import numpy

            return numpy.array(inner[1], dtype=inner[0])
        if name == "builtin":
            found = getattr(builtins, inner)
            if found is not NotImplemented and not isinstance(found, type):  # no eval comes over the wire
                raise TypeError(f"{inner} is no type")
            return found
        if name == "yours":
            return self.kept[inner]
        if inner not in self.proxies:
            self.proxies[inner] = Proxy(self, inner)
        return self.proxies[inner]

    # calls

    def ask(self, what: str, target: Any, *arguments: Any, **named: Any) -> Any:
        """What the other side gives for ``what`` done to an object of its own; raises what that raises."""
        call = [
            self.encoded(target),
            [self.encoded(a) for a in arguments],
            {k: self.encoded(v) for k, v in named.items()},
        ]
        self.send({"do": what, "with": call})
        while True:
            answer = self.receive()
            if "do" in answer:
                self.serve(answer)
                continue
            for argument, new in zip([*arguments, *named.values()], answer["changed"], strict=True):
                if new is not None:
                    replace(argument, self.decoded(new))
            if "raised" in answer:
                raise self.exception(*answer["raised"])
            return self.decoded(answer["value"])

    def serve(self, call: dict[str, Any]) -> None:
        """Does what the other side asks for, and answers."""
        target, arguments, named = call["with"]
        before, given = [*arguments, *named.values()], []
        try:
            given = [self.decoded(one) for one in before]
            what, target = call["do"], self.decoded(target)
            if not self.is_open:
                self.refuse(what, call["with"][0], target, given)
            positional = given[: len(arguments)]
            result = do(what, target, positional, dict(zip(named, given[len(arguments) :], strict=True)))
            answer: dict[str, Any] = {"value": self.encoded(result)}
        except Gone:
            raise
        except BaseException as error:
            answer = {"raised": described(error)}
        answer["changed"] = [self.change(value, old) for value, old in zip(given, before, strict=False)]
        answer["changed"] += [None] * (len(before) - len(given))
        self.send(answer)

    def change(self, value: Any, before: Any) -> Any:
        """A mutable argument as it is now, where that is not as it was."""
        if not isinstance(value, MUTABLE):
            return None
        now = self.encoded(value)
        return None if now == before else now

    def refuse(self, what: str, given: Any, target: Any, arguments: list[Any]) -> None:
        """TypeError for what could lead from an object that a test gave away to the test itself: it may be called, iterated,
        and, where its class is the test's, asked for attributes."""
        iterated = what == "method" and arguments[0] in ("__next__", "__iter__", "__len__")
        attribute = what in ("getattr", "setattr") and type(target).__module__ == "tests"
        public = attribute and not str(arguments[0]).startswith("_")
        if "yours" not in given or not (what == "call" or iterated or public):
            raise TypeError(f"the tested code may not {what} this object")

    def exception(self, names: list[str], text: str) -> BaseException:
        """One of the nearest class that is known here."""
        return next((kind(text) for name in names if (kind := self.known_exception(name))), Exception(text))

    def known_exception(self, name: str) -> type[BaseException] | None:
        kind = self.exceptions.get(name) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__init__ is not UnicodeError.__init__:
            return kind
        return None

    # messages

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            self.wire.write(line)
            self.wire.flush()
        except OSError:
            self.gone = True
            raise Gone("the tested code has ended") from None

    def receive(self) -> dict[str, Any]:
        try:
            line = self.wire.readline()
        except OSError:
            line = b""
        if not line:
            self.gone = True
            raise Gone("the tested code has ended")
        found: dict[str, Any] = json.loads(line)
        return found


def do(what: str, target: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    if what == "call":
        return target(*arguments, **named)
    if what == "method":  # one of Python's own, such as __len__
        name, *rest = arguments
        method = getattr(type(target), name, None)
        return NotImplemented if method is None else method(target, *rest)
    if what == "bool":
        return bool(target)
    if what == "isinstance":
        return isinstance(arguments[0], target)
    attribute: Any = {"getattr": getattr, "setattr": setattr, "delattr": delattr}[what]
    return attribute(target, *arguments)


def described(error: BaseException) -> tuple[list[str], str]:
    """An exception as the names of its classes, the nearest first, and its text."""
    try:
        text = str(error.args[0] if len(error.args) == 1 else error)[:1000]
    except Exception:
        text = ""
    return [kind.__name__ for kind in type(error).__mro__], text


def replace(old: Any, new: Any) -> None:
    """Makes a mutable value what the other side has made of it."""
    if isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    else:
        old[:] = new if not isinstance(old, collections.deque) else ()
        old.extend(new) if isinstance(old, collections.deque) else None


class Proxy:
    """An object of the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_vime_peer", peer)
        object.__setattr__(self, "_vime_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        ask(self, "delattr", name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask(self, "call", *arguments, **named)

    def __bool__(self) -> bool:
        return bool(ask(self, "bool"))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Proxy) and bool(ask(self, "isinstance", value))

    def __hash__(self) -> int:
        return hash(ask(self, "method", "__hash__"))

    def __exit__(self, *_: object) -> Any:
        return ask(self, "method", "__exit__", None, None, None)


def ask(proxy: Proxy, what: str, *arguments: Any, **named: Any) -> Any:
    peer: Peer = object.__getattribute__(proxy, "_vime_peer")
    return peer.ask(what, proxy, *arguments, **named)


def forward(name: str, among_proxies: bool) -> Any:
    def method(self: Proxy, *arguments: Any) -> Any:
        if among_proxies and not isinstance(arguments[0], Proxy):
            return NotImplemented
        return ask(self, "method", name, *arguments)

    return method


ALONE = "neg pos abs invert int float index round len iter next getitem setitem delitem str repr enter"
TOGETHER = "eq lt le gt ge add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
for _name in [*ALONE.split(), *TOGETHER.split()]:
    setattr(Proxy, f"__{_name}__", forward(f"__{_name}__", _name in TOGETHER.split()))


def serve_code(descriptor: int) -> None:
    """Runs the solution, then does what the tests ask of it."""
    peer = Peer(descriptor, is_open=True)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    home = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(home, "solution.py"), encoding="utf-8") as file:
        source = file.read()
    try:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
        failed = None
    except BaseException as error:
        failed = described(error)
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    errors = {
        n: [k.__name__ for k in v.__mro__]
        for n, v in own.items()
        if inspect.isclass(v) and issubclass(v, BaseException)
    }
    values = {n: peer.encoded(v) for n, v in own.items() if not inspect.ismodule(v) and n not in errors}
    peer.send({"failed": failed, "errors": errors, "values": values})
    while True:
        peer.serve(peer.receive())


def names_of(peer: Peer) -> dict[str, Any]:
    """What the tests see of the solution: its names, less those of Python's own and of modules, which tests must be able to
    rely on."""
    found = peer.receive()
    if found["failed"]:
        raise peer.exception(*found["failed"])
    for name, kinds in sorted(found["errors"].items(), key=lambda item: len(item[1])):
        base = next(known for kind in kinds[1:] if (known := peer.known_exception(kind)))
        peer.exceptions[name] = type(name, (base,), {})
    names = {name: peer.decoded(value) for name, value in found["values"].items()} | peer.exceptions
    return {name: value for name, value in names.items() if not hasattr(builtins, name) and not name.startswith("__")}


def run_test(code: str, entry_point: str, names: dict[str, Any]) -> None:
    """Raises where the test fails. Functions that it defines are called: ``test_...()``, and ``check(entry point)``."""
    space = {**names, "__name__": "tests"}
    exec(compile(code, "test", "exec"), space)
    for statement in ast.parse(code).body:
        name = getattr(statement, "name", "") if isinstance(statement, ast.FunctionDef) else ""
        if name.startswith("test_"):
            space[name]()
        elif name == "check" and entry_point:
            space[name](eval(entry_point, space))


def run_tests(descriptor: int, reports: int) -> None:
    """Reports on each test, up to one at which the tested code ended."""
    peer = Peer(descriptor, is_open=False)
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["solution"] = module = types.ModuleType("solution")
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests.json"), encoding="utf-8") as file:
        given = json.load(file)
    names: dict[str, Any] | None = None
    for test in given["tests"]:
        fault = ""
        try:
            if names is None:
                names = names_of(peer)
                module.__dict__.update(names)
            run_test(test, given["entry_point"], names)
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        report = {"passed": not fault and not peer.gone, "fault": fault, "gone": peer.gone, "unusable": names is None}
        os.write(reports, json.dumps(report).encode() + b"\n")
        if peer.gone or names is None:
            return


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    if sys.argv[1] == "code":
        serve_code(int(sys.argv[2]))
    else:
        run_tests(int(sys.argv[2]), int(sys.argv[3]))
