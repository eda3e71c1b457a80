"""A template rewritten so that it tells its environment what it does; the text it writes stays the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from trainer.data.sandbox import BoundedEnvironment


class Counting(NodeTransformer):
    """Puts calls of the environment's hooks into a template's tree."""

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

    def _passing(self, node: nodes.Node, size: int) -> nodes.Node:
        return self._hook("passed", node, [nodes.Const(size, lineno=node.lineno)])

    def _hook(self, name: str, node: nodes.Node, values: list[nodes.Node]) -> nodes.Node:
        found = nodes.EnvironmentAttribute(name, lineno=node.lineno)
        call = nodes.Call(found, values, [], None, None, lineno=node.lineno)
        return call.set_environment(self.environment)


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
