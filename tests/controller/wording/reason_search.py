"""Every code that source of ours gives as a reason: followed from whoever takes a `reason` to what is handed there.

Taken are parameters and fields named `reason`, wherever they are declared; followed are constants, names assigned in
the same function or at the top of a module, conditionals, tables, and functions of ours that return one. An f-string
makes a pattern, `*` for each part that is filled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("reason", "held_by", "mind", "failed", "how")
ANSWER = ("_cause", "_decided")  # functions whose answer is one
CODE = re.compile(r"[a-z*][a-z0-9*]*(_[a-z0-9*]+)*")
DEEPEST = 4  # calls followed
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | None


@dataclass
class Source:
    """The modules of some folders, and what is known of their names."""

    trees: dict[str, ast.Module]
    takes: dict[str, set[int]] = field(default_factory=dict)  # positions of a reason, by the name that is called
    functions: dict[str, list[Function]] = field(default_factory=dict)
    constants: dict[str, list[ast.expr]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tree in self.trees.values():
            for target, value in _assigned(tree.body):
                self.constants.setdefault(target, []).append(value)
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    self.functions.setdefault(node.name, []).append(node)
                    self._taken(node.name, _parameters(node))
                elif isinstance(node, ast.ClassDef):
                    self._taken(node.name, _fields(node))

    def _taken(self, name: str, parameters: list[str]) -> None:
        places = {place for place, parameter in enumerate(parameters) if parameter in NAMES}
        if places:
            self.takes.setdefault(name, set()).update(places)

    def reasons(self) -> dict[str, str]:
        """Code to one file that gives it."""
        found = {}
        for path, tree in self.trees.items():
            for scope, node in _scoped(tree):
                found |= dict.fromkeys(self.any_of(self._given(node), scope, 0), path)
                if isinstance(node, Function) and node.name in ANSWER:
                    found |= dict.fromkeys(self._answers(node, 0), path)
        return found

    def _given(self, node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Call):
            name = _name(node.func)
            for place in self.takes.get(name, ()):
                if len(node.args) > place and not any(isinstance(each, ast.Starred) for each in node.args[: place + 1]):
                    yield node.args[place]
            yield from (keyword.value for keyword in node.keywords if keyword.arg in NAMES)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from (value for target, value in _assigned([node]) if target in NAMES)

    def codes(self, node: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
        """What an expression may be."""
        match node:
            case ast.Constant() | ast.JoinedStr():
                return _text(node)
            case ast.IfExp():
                return self.any_of([node.body, node.orelse], scope, depth)
            case ast.BoolOp():
                return self.any_of(node.values, scope, depth)
            case _ if depth < DEEPEST:
                return self._followed(node, scope, depth + 1)
            case _:
                return set()

    def any_of(self, nodes: Iterable[ast.expr], scope: Scope, depth: int) -> set[str]:
        return set().union(*(self.codes(node, scope, depth) for node in nodes))

    def _followed(self, node: ast.expr, scope: Scope, depth: int) -> set[str]:
        """A name, a table's entry, or what a function of ours answers."""
        match node:
            case ast.Name(name):
                here = [value for target, value in _assigned(ast.walk(scope) if scope else ()) if target == name]
                return self.any_of(here or self.constants.get(name, []), scope if here else None, depth)
            case ast.Subscript():
                return self._table(node.value, depth)
            case ast.Call(ast.Attribute(table, "get"), [_, *rest]):
                return self._table(table, depth) | self.any_of(rest, scope, depth)
            case ast.Call():
                functions = [each for each in self.functions.get(_name(node.func), []) if _name(each.returns) == "str"]
                return set().union(*(self._answers(each, depth) for each in functions))
            case _:
                return set()

    def _answers(self, function: Function, depth: int) -> set[str]:
        found = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value is not None]
        return self.any_of(found, function, depth)

    def _table(self, node: ast.expr, depth: int) -> set[str]:
        """What a dictionary, named or not, holds."""
        tables = self.constants.get(node.id, []) if isinstance(node, ast.Name) else [node]
        values = [value for each in tables if isinstance(each, ast.Dict) for value in each.values]
        return self.any_of(values, None, depth)


def read(root: Path, folders: tuple[str, ...], left_out: re.Pattern[str]) -> Source:
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    names = {str(path.relative_to(root)): path for path in paths}
    return Source({name: ast.parse(path.read_text()) for name, path in names.items() if not left_out.search(name)})


def _name(node: ast.expr | None) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _text(node: ast.Constant | ast.JoinedStr) -> set[str]:
    """A code, or a pattern of one."""
    if isinstance(node, ast.Constant):
        made = node.value if isinstance(node.value, str) else ""
    else:
        made = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return {made} if CODE.fullmatch(made) and made != "*" else set()


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Name and value of what these statements assign, also side by side."""
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from ((_name(each), value) for each, value in zip(target.elts, node.value.elts, strict=False))
            elif isinstance(target, ast.Name):
                yield target.id, node.value


def _parameters(node: Function) -> list[str]:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _fields(node: ast.ClassDef) -> list[str]:
    """As its constructor takes them."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _parameters(each)
    return [_name(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]


def _scoped(tree: ast.Module) -> Iterator[tuple[Scope, ast.AST]]:
    """Every node, with the function around it."""
    waiting: list[tuple[Scope, ast.AST]] = [(None, tree)]
    while waiting:
        scope, node = waiting.pop()
        yield scope, node
        inner = node if isinstance(node, Function) else scope
        waiting += [(inner, child) for child in ast.iter_child_nodes(node)]
