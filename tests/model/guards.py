"""Every guard of `decide`, found in its source, and `decide` without it: each has to be missed.

A guard is the condition of an `if`, and each operand of one that is put together with `and` or `or`. Disabled, a whole
condition never holds, and an operand does not count.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mcdaemon import decide as policy
from tests.model.explore import Exploration, explore
from tests.model.node import KINDS
from tests.model.world import Decide

SOURCE = Path(str(policy.__file__))


@dataclass(frozen=True)
class Guard:
    """`function`, line and text of the condition; `disabled`: what stands in its place."""

    function: str
    line: int
    column: int
    text: str
    disabled: bool

    def __str__(self) -> str:
        return f"{self.function}: {self.text}"


def guards() -> tuple[Guard, ...]:
    """All of them, in the order of the text."""
    return tuple(_found(ast.parse(SOURCE.read_text())))


def _found(tree: ast.Module) -> Iterator[Guard]:
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for statement in ast.walk(function):
                if isinstance(statement, (ast.If, ast.IfExp, ast.While)):
                    for node, disabled in _conditions(statement.test):
                        yield Guard(function.name, node.lineno, node.col_offset, ast.unparse(node), disabled)


def _conditions(test: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    yield test, False
    for inner in ast.walk(test):
        if isinstance(inner, ast.BoolOp):
            for operand in inner.values:
                yield operand, isinstance(inner.op, ast.And)


class _Disable(ast.NodeTransformer):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.done = False

    def visit(self, node: ast.AST) -> ast.AST:
        guard = self._guard
        here = isinstance(node, ast.expr) and (node.lineno, node.col_offset) == (guard.line, guard.column)
        if here and not self.done and ast.unparse(node) == guard.text:
            self.done = True
            return ast.copy_location(ast.Constant(guard.disabled), node)
        return self.generic_visit(node)


def without(guard: Guard) -> Decide:
    """`decide` with this guard disabled."""
    change = _Disable(guard)
    functions: list[ast.stmt] = []
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            changed = ast.fix_missing_locations(change.visit(node))
            assert isinstance(changed, ast.FunctionDef)
            functions.append(changed)
    assert change.done, guard
    module = types.ModuleType("decide_without_a_guard")
    # Its classes are those of the real module: what it gets and gives is compared with them.
    module.__dict__.update(vars(policy))
    annotations = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(annotations + functions, []), str(SOURCE), "exec"), module.__dict__)
    mutant: Decide = module.__dict__["decide"]
    return mutant


def counterexample(decide: Decide, most: int) -> Optional[Exploration]:
    """What goes wrong with it in any kind of update, with up to so many disturbances; None when nothing does.

    With one disturbance most is found at once; the rarest states are those of an update that reboots.
    """
    deep = sorted(KINDS, key=lambda kind: (not kind.reboot, kind.os))
    for faults, kinds in ((1, KINDS), (most, deep)):
        for kind in kinds:
            found = explore(kind, decide, faults)
            if found.wrong:
                return found
    return None


def main() -> None:
    """Print what is missed without each guard."""
    for guard in guards():
        found = counterexample(without(guard), 3)
        print(f"{guard}\n    {f'{found.kind.name}: {found.wrong}' if found else 'NOTHING'}", flush=True)


if __name__ == "__main__":
    main()
