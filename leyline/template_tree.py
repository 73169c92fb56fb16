"""What is done to a chat template's tree before it is compiled: checked, and rewritten.

Checked, because a part of Python or another file that a template asks for is a reason to refuse it
when it is loaded, even where that part would hardly ever run. Rewritten, so that whatever works
without calling anything (loops, output, `~`, slices, literals, comparisons) passes through filters
of `leyline.template_sandbox` that report to the meter.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

NODES_A_STEP = 16  # of the tree, in a turn of a loop or a call of a macro
SMALL_LITERAL = 32  # constants
INTERNALS = frozenset({"mro", "gi_frame", "gi_code", "cr_frame", "cr_code"})
# Names of our own filters; no template can write them in a pipe.
TURNS, OUTPUT, CONCAT, MEASURED, SPENT = "~turns", "~output", "~concat", "~measured", "~spent"


def check_node(node: nodes.Node) -> None:
    """Refuse what no template needs, wherever it stands.

    Raises:
        SecurityError: It asks for another file or a part of Python, or writes HTML.
    """
    if isinstance(node, (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)):
        raise SecurityError(f"line {node.lineno} asks for another file")
    if isinstance(node, nodes.EvalContextModifier):
        raise SecurityError(f"line {node.lineno} changes how text is escaped")
    names: list[Any] = []
    if isinstance(node, nodes.Getattr):
        names = [node.attr]
    elif isinstance(node, nodes.Getitem):
        names = [node.arg]
    elif isinstance(node, nodes.Filter):
        names = [*node.args, *(keyword.value for keyword in node.kwargs)]
    for name in names:
        text = name.value if isinstance(name, nodes.Const) else name
        if isinstance(text, str) and (_is_dunder(text) or text in INTERNALS):
            raise SecurityError(f"line {node.lineno} reaches for {text!r}, a part of Python")


def _is_dunder(name: str) -> bool:
    return any(part.startswith("__") and part.endswith("__") for part in name.split("."))


class Metering(NodeTransformer):
    """Puts our own filters wherever a template works without calling anything."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Rewrite what is below a node, and count what has a body whenever it runs."""
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, (nodes.Macro, nodes.CallBlock, nodes.Block)):
            node.body.insert(0, nodes.ExprStmt(self._filtered(_weight(node), SPENT, node)))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """Count what is written."""
        self.generic_visit(node)
        pieces = [
            nodes.Const(piece.data) if isinstance(piece, nodes.TemplateData) else piece
            for piece in node.nodes
        ]
        node.nodes = [self._filtered(nodes.List(pieces), OUTPUT, node)]
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count the turns; those of `loop(...)`, in the loop itself."""
        self.generic_visit(node)
        weight = _weight(node)
        node.iter = self._filtered(node.iter, TURNS, node, weight)
        if node.recursive:
            spent = self._filtered(weight, SPENT, node)  # is None
            if node.test is not None:
                node.test = nodes.Or(spent, node.test)
            for body in (node.body, node.else_):
                if body:
                    body.insert(0, nodes.ExprStmt(spent))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        """Bound `a ~ b`."""
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes), CONCAT, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """Count what a slice copies."""
        self.generic_visit(node)
        return self._filtered(node, MEASURED, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:
        """Count what is compared: it costs no more than to walk the right side."""
        self.generic_visit(node)
        if not _is_small(node.expr):
            node.expr = self._filtered(node.expr, MEASURED, node)
        return node

    def visit_Literal(self, node: nodes.Literal) -> nodes.Expr:
        """Count what a list, tuple or mapping is made of."""
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        if is_target or _is_small(node):
            return node
        return self._filtered(node, MEASURED, node)

    visit_List = visit_Tuple = visit_Dict = visit_Literal

    def _filtered(self, node: Any, name: str, place: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(node, name, list(args), [], None, None)
        made.set_environment(self._environment)
        made.set_lineno(place.lineno)
        return made


def _weight(node: nodes.Node) -> nodes.Const:
    """Steps of a body, for what it does without calling anything."""
    return nodes.Const(1 + sum(1 for _ in node.find_all(nodes.Node)) // NODES_A_STEP)


def _is_small(node: nodes.Node) -> bool:
    """Whether a node is a constant, or a handful of them."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return constant and len(node.items) <= SMALL_LITERAL
    return isinstance(node, nodes.Const)
