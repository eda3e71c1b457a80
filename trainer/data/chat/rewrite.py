"""A template rewritten so that it tells its environment what it does; the text it writes stays the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from trainer.data.chat import allowed

if TYPE_CHECKING:
    from trainer.data.chat.sandbox import BoundedEnvironment


class Counting(NodeTransformer):
    """Puts calls of the environment's hooks into a template's tree, and refuses what allowed.py does not list.

    Raises TemplateSyntaxError with the name of what is refused.
    """

    def __init__(self, environment: BoundedEnvironment):
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        size = _text_in(node.body)
        self.generic_visit(node)
        node.iter = self._hook("counted", node.iter, [node.iter])
        if node.test is not None:
            node.test = nodes.And(self._passing(node, 0), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(self._passing(node, size), lineno=node.lineno))
        return node

    def visit_Macro(self, node: Any) -> Any:
        size = _text_in(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._passing(node, size), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("joined", node, node.nodes)

    def visit_List(self, node: Any) -> nodes.Node:
        constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"
        return node if constant or stored else self._hook("measured", node, [node])

    visit_Tuple = visit_List
    visit_Dict = visit_List

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:
        """A search takes as long as what is searched."""
        self.generic_visit(node)
        if node.op in ("in", "notin") and not isinstance(node.expr, (nodes.Const, nodes.List, nodes.Tuple)):
            node.expr = self._hook("seen", node.expr, [node.expr])
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("sliced", node, [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        _check(node.name, "filter", allowed.FILTERS, node)
        if node.name in _NAMES_ANOTHER and len(node.args) > (place := _NAMES_ANOTHER[node.name]):
            other = node.args[place]
            if isinstance(other, nodes.Const) and node.name == "map":
                _check(other.value, "filter", allowed.FILTERS, node)
            elif isinstance(other, nodes.Const):
                _check(other.value, "test", allowed.TESTS, node)
        self.generic_visit(node)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        _check(node.name, "test", allowed.TESTS, node)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if isinstance(node.node, nodes.Getattr) and not node.node.attr.startswith("_"):  # those are the sandbox's
            _check(node.node.attr, "method", allowed.CALLED, node)
        self.generic_visit(node)
        return node

    def _refuse(self, node: nodes.Node) -> None:
        name = type(node).__name__.lower()
        raise TemplateSyntaxError(f"the statement {name} is not allowed in templates", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> None:
        raise TemplateSyntaxError("the statement autoescape is not allowed in templates", node.lineno)

    def _passing(self, node: nodes.Node, size: int) -> nodes.Node:
        return self._hook("passed", node, [nodes.Const(size, lineno=node.lineno)])

    def _hook(self, name: str, node: nodes.Node, values: list[nodes.Node]) -> nodes.Node:
        found = nodes.EnvironmentAttribute(name, lineno=node.lineno)
        call = nodes.Call(found, values, [], None, None, lineno=node.lineno)
        return call.set_environment(self.environment)


_NAMES_ANOTHER = {"map": 0, "select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
"""Filters that take the name of another filter or test, and where."""


def _check(name: str, kind: str, names: Collection[str], node: nodes.Node) -> None:
    if name not in names:
        known = ", ".join(sorted(names))
        raise TemplateSyntaxError(f"the {kind} {name} is not allowed in templates; allowed are {known}", node.lineno)


def _text_in(body: list[nodes.Node]) -> int:
    """Characters that stand in a body itself; those of loops in it are counted by their own turns."""
    total, left = 0, list(body)
    while left:
        node = left.pop()
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            total += len(node.value)
        elif not isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            left += node.iter_child_nodes()
    return total
