"""Calls found and replaced in a syntax tree, everything around them kept to the byte."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from forksync.rules.signature import Argument, Signature, Unbound, bind

RECEIVER = "_forksync_receiver_"
"""What ``$name`` is spelled as in a template: Python has no such names."""

ATOMS = (
    cst.Name,
    cst.Attribute,
    cst.Call,
    cst.Subscript,
    cst.BaseNumber,
    cst.SimpleString,
    cst.FormattedString,
    cst.BaseList,
    cst.BaseDict,
    cst.BaseSet,
)
"""Expressions that need no parentheses anywhere."""

Bound = dict[str, Sequence[Argument[cst.BaseExpression]]]


def parse_expression(text: str) -> cst.BaseExpression:
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError as fault:
        raise ValueError(f"{text!r} is no expression: {fault.message}") from fault


def names_in(template: cst.BaseExpression) -> set[str]:
    """The names that a template may take from a call."""
    found: set[str] = set()

    class Names(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:
            found.add(node.value)

    template.visit(Names())
    return found


def parenthesised(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression in parentheses, unless it needs none anywhere."""
    if isinstance(node, ATOMS) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def dotted(node: cst.BaseExpression) -> list[str]:
    """The parts of ``a.b.c``; empty for any other expression."""
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return [*before, node.attr.value] if before else []
    return []


class Fill(cst.CSTTransformer):
    """Puts a call's arguments into a template."""

    def __init__(self, signature: Signature, bound: Bound) -> None:
        super().__init__()
        self.signature, self.bound = signature, bound

    def value(self, name: str) -> cst.BaseExpression | None:
        """What stands for a name of the template; None if it is no parameter."""
        if name in self.bound:
            return parenthesised(self.bound[name][0].value)
        parameter = self.signature.parameter(name)
        return parse_expression(parameter.default) if parameter and parameter.default else None

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self.value(original_node.value) or updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        made: list[cst.Arg] = []
        pending: list[cst.Arg] = []  # positional arguments by default, needed only if one that the call gives follows
        for template, filled in zip(original_node.args, updated_node.args, strict=True):
            name = template.value.value if isinstance(template.value, cst.Name) else None
            parameter = self.signature.parameter(name) if name else None
            filled = filled.with_changes(keyword=template.keyword, comma=cst.MaybeSentinel.DEFAULT)
            if parameter and template.star:
                made += pending if self.bound.get(parameter.name) else []
                made += [argument_node(argument) for argument in self.bound.get(parameter.name, ())]
            elif parameter and parameter.name not in self.bound:
                pending += [] if template.keyword else [filled]
            else:
                made += [] if template.keyword else pending
                value = self.bound[parameter.name][0].value if parameter else filled.value
                made.append(filled.with_changes(value=bracketed(value)))
                pending = [] if not template.keyword else pending
        return updated_node.with_changes(args=made)


def bracketed(value: cst.BaseExpression) -> cst.BaseExpression:
    """A generator that was the only argument had its call's parentheses."""
    return parenthesised(value) if isinstance(value, cst.GeneratorExp) else value


def argument_node(argument: Argument[cst.BaseExpression]) -> cst.Arg:
    equal = (
        cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        if argument.keyword
        else cst.MaybeSentinel.DEFAULT
    )
    keyword = cst.Name(argument.keyword) if argument.keyword else None
    return cst.Arg(bracketed(argument.value), star=argument.star, keyword=keyword, equal=equal)


def laid_out(made: cst.BaseExpression, original: cst.Call) -> cst.BaseExpression:
    """The new call with its arguments on lines as the old one's were."""
    if isinstance(made, cst.Await):
        return made.with_changes(expression=laid_out(made.expression, original))
    if not isinstance(made, cst.Call) or not made.args or not original.args:
        return made
    first, last = original.args[0], original.args[-1]
    between = first.comma if len(original.args) > 1 else cst.MaybeSentinel.DEFAULT
    args = [arg.with_changes(comma=between) for arg in made.args[:-1]]
    args.append(made.args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg))
    return made.with_changes(args=args, whitespace_before_args=original.whitespace_before_args)


class Rewriter(cst.CSTTransformer):
    """``uses`` counts the calls that were replaced, ``said`` has those that should have been and why they were not."""

    def __init__(
        self,
        signature: Signature,
        template: cst.BaseExpression,
        drops: Sequence[str],
        receiver: str,
        names: dict[str, str],
        module: str,
    ) -> None:
        super().__init__()
        self.signature, self.template, self.names, self.module = signature, template, names, module
        self.free = names_in(template) | set(drops)
        self.receiver = re.compile(receiver, re.DOTALL)
        self.uses = 0
        self.said: list[str] = []
        self.above: list[cst.CSTNode] = []
        self.called: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.above.append(node)
        if isinstance(node, cst.Call):
            self.called.add(node.func)
        return not isinstance(node, cst.Import | cst.ImportFrom)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        self.above.pop()
        made: cst.BaseExpression | None = None
        if isinstance(updated_node, cst.Await) and self.signature.awaited and isinstance(original_node, cst.Await):
            if isinstance(original_node.expression, cst.Call) and isinstance(updated_node.expression, cst.Call):
                made = self.replaced(original_node.expression, updated_node.expression)
        elif isinstance(updated_node, cst.Call) and not self.signature.awaited and isinstance(original_node, cst.Call):
            made = self.replaced(original_node, updated_node)
        elif isinstance(original_node, cst.Name | cst.Attribute) and original_node not in self.called:
            self.mention(original_node)
        return updated_node if made is None else self.placed(updated_node, made)

    def placed(self, old: cst.CSTNode, made: cst.BaseExpression) -> cst.BaseExpression:
        """In parentheses where the old expression had them, or where what is around needs them."""
        if isinstance(old, cst.BaseExpression) and old.lpar:
            return made.with_changes(lpar=old.lpar, rpar=old.rpar)
        inside = self.above and isinstance(self.above[-1], cst.BaseExpression)
        same = isinstance(old, cst.Await) and isinstance(made, cst.Await)
        return parenthesised(made) if inside and not same else made

    def is_it(self, function: cst.BaseExpression) -> bool:
        if self.signature.receiver is not None:
            return (
                isinstance(function, cst.Attribute)
                and function.attr.value == self.signature.function
                and self.receiver.fullmatch(source(function.value)) is not None
            )
        parts = dotted(function)
        if not parts:
            return False
        known = self.names.get(parts[0])
        if known is None:
            return len(parts) == 1 and self.signature.function in (parts[0], f"{self.module}.{parts[0]}")
        return ".".join([known, *parts[1:]]) == self.signature.function

    def replaced(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        """What stands for the call; None if it is another's, or does not fit."""
        if not self.is_it(original.func):
            return None
        given = [Argument(arg.value, arg.star, arg.keyword.value if arg.keyword else None) for arg in updated.args]
        try:
            bound = dict(bind(self.signature, given))
        except Unbound as why:
            self.said.append(f"{shown(original)} is left alone: {why}")
            return None
        if lost := [name for name in bound if name not in self.free]:
            self.said.append(
                f"{shown(original)} is left alone: to has no place for {lost[0]}; list it in drops if it may go"
            )
            return None
        if self.signature.receiver is not None and isinstance(updated.func, cst.Attribute):
            bound[f"{RECEIVER}{self.signature.receiver}"] = [Argument(updated.func.value)]
        self.uses += 1
        filled = self.template.deep_clone().visit(Fill(self.signature, bound))
        assert isinstance(filled, cst.BaseExpression)
        return laid_out(filled, updated)

    def mention(self, node: cst.Name | cst.Attribute) -> None:
        if self.signature.receiver is None and "." in self.signature.function and self.is_it(node):
            self.said.append(f"{shown(node)} is used without a call, and is left alone")


def source(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def shown(node: cst.CSTNode) -> str:
    """The node's source in one short line."""
    return re.sub(r"\s+", " ", source(node))[:100]
