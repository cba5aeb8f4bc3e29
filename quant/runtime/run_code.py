"""One Python function for a run of instructions that each run by themselves: straight-line code over local variables.

A forward's sizes, views and sums of numbers take less time than a loop over them that looks up registers. The source
holds names of this module's own, signs of Python's operators, and names of attributes and methods that are plain ASCII
identifiers; everything else, whatever a file or a user named it, is bound to the function as a value.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import nn

from quant.runtime.callee import Function, Method
from quant.runtime.filling import Fill, is_constant
from quant.runtime.instructions import FloatCall, Guard, Instruction, IntegerMove
from quant.runtime.names import tensor_reader
from quant.runtime.origin import Edge
from quant.runtime.trees import Attr, Ref

Filled: TypeAlias = Callable[[dict[int, Any]], bool]
"""Fills the registers of a run; False, and nothing done, where a module is not in its place any more."""

FIRST = 3
"""The line of the first statement of a run's function."""

SIGNS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lt: "<", operator.le: "<=", operator.eq: "==", operator.ne: "!=", operator.gt: ">",
    operator.ge: ">=",
}  # fmt: skip
"""Functions of two arguments that are Python's operators."""


class _Unwritable(Exception):
    """A tree that has no source here."""


class _Source:
    """The source of a function while it grows.

    Attributes:
        lines: its statements.
        bound: values that the source names c0, c1, ...
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.lines: list[str] = []
        self.bound: list[Any] = []
        self._constants: dict[Any, str] = {}
        self._locals: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """The name of a value that is bound to the function."""
        plain = isinstance(value, (int, str, type(None)))
        key = (type(value), value) if plain else id(value)  # `bound` keeps it, so that no other gets its id
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"c{len(self.bound)}"
            self.bound.append(value)
        return name

    def local(self, register: int) -> str:
        """The variable of a register."""
        return self._locals.setdefault(register, f"v{len(self._locals)}")

    def tree(self, tree: Any) -> str:
        """An expression that builds nested arguments.

        Raises:
            _Unwritable: it holds objects.
        """
        kind = type(tree)
        if kind is Ref:
            return self.local(tree.index)
        if is_constant(tree):
            return self.constant(tree)
        if kind is Attr:
            return f"{self.constant(tensor_reader(self.root, tree.path))}()"
        if kind is tuple:
            return "(" + "".join(f"{self.tree(one)}, " for one in tree) + ")"
        if kind is list:
            return "[" + ", ".join(map(self.tree, tree)) + "]"
        if kind is dict:
            return "{" + ", ".join(f"{self.constant(key)}: {self.tree(one)}" for key, one in tree.items()) + "}"
        if kind is slice:
            ends = ", ".join(map(self.tree, (tree.start, tree.stop, tree.step)))
            return f"{self.constant(slice)}({ends})"
        raise _Unwritable

    def value(self, instruction: Instruction, direct: Fill) -> str:
        """An expression for an instruction's value."""
        if isinstance(instruction, (FloatCall, IntegerMove)):
            try:
                return self._call(instruction)
            except _Unwritable:
                pass
        read = ", ".join(f"{self.constant(one)}: {self.local(one)}" for one in sorted(instruction.reads))
        return f"{self.constant(direct)}({{{read}}})"

    def _call(self, instruction: FloatCall | IntegerMove) -> str:
        callee, (args, kwargs) = instruction.callee, instruction.arguments
        if not all(map(_is_name, kwargs)):
            raise _Unwritable
        named = [f"{name}={self.tree(one)}" for name, one in kwargs.items()]
        if isinstance(callee, Method) and _is_name(callee.name) and args:
            owner, *others = map(self.tree, args)
            return f"{owner}.{callee.name}({', '.join([*others, *named])})"
        if not isinstance(callee, Function):
            raise _Unwritable
        target = callee.target
        if not named and len(args) == 2:
            if target is getattr and type(args[1]) is str and _is_name(args[1]):
                return f"{self.tree(args[0])}.{args[1]}"
            if target is operator.getitem:
                return f"{self.tree(args[0])}[{self.tree(args[1])}]"
            if _is_hashable(target) and target in SIGNS:
                return f"{self.tree(args[0])} {SIGNS[target]} {self.tree(args[1])}"
        return f"{self.constant(target)}({', '.join([*map(self.tree, args), *named])})"

    def function(self) -> Filled:
        """The function, whose first statement is on line `FIRST`."""
        names = ", ".join(f"c{place}" for place in range(len(self.bound)))
        body = "".join(f"        {line}\n" for line in self.lines)
        return _bind(f"def bind({names}):\n    def fill(registers):\n{body}    return fill\n")(*self.bound)


def run_function(
    root: nn.Module,
    steps: Sequence[tuple[Instruction, Fill]],
    drops: Sequence[Iterable[int]],
    edges: Iterable[Edge],
) -> tuple[Filled, dict[int, Instruction]]:
    """The function that runs instructions one after another, and the instruction of each of its lines.

    Args:
        root: the module of their program.
        steps: the instructions, each with a function of the registers that gives its value.
        drops: for each, the registers that nobody reads after it.
        edges: the modules that must be in their places.
    """
    source, made, owners = _Source(root), {one.out for one, _ in steps}, dict[int, Instruction]()
    dropped = {register for gone in drops for register in gone}
    for edge in edges:
        children, name, module = map(source.constant, (edge.children, edge.name, edge.module))
        source.lines.append(f"if {children}.get({name}) is not {module}: return False")
    given = [one for one in dict.fromkeys(one for step, _ in steps for one in sorted(step.reads)) if one not in made]
    for register in given:
        take = ".pop({})" if register in dropped else "[{}]"
        source.lines.append(f"{source.local(register)} = registers{take.format(source.constant(register))}")
    for (instruction, direct), gone in zip(steps, drops, strict=True):
        owners[len(source.lines)] = instruction
        if isinstance(instruction, Guard):
            asked, expected = source.local(instruction.source), source.constant(instruction.expected)
            source.lines.append(f"if {asked} != {expected}: {source.value(instruction, direct)}")
            source.lines.append(f"{source.local(instruction.out)} = {asked}")
        else:
            value = source.value(instruction, direct)
            source.lines.append(f"{source.local(instruction.out)} = {value}")
        released = [source.local(register) for register in gone if register in made or register in given]
        source.lines += [" = ".join([*released, "None"])] if released else []
    kept = sorted(made - dropped)
    source.lines += [f"registers[{source.constant(register)}] = {source.local(register)}" for register in kept]
    others = sorted(dropped - made - set(given))
    source.lines += [f"registers.pop({source.constant(register)}, None)" for register in others]
    source.lines.append("return True")
    return source.function(), owners


def _is_name(text: Any) -> bool:
    """Whether a text is a name that source may hold; Python normalises letters beyond ASCII."""
    return type(text) is str and text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _is_hashable(target: Any) -> bool:
    return type(target).__hash__ is not None


@functools.lru_cache(maxsize=512)
def _bind(source: str) -> Callable[..., Filled]:
    """The function that binds values to a run's source; the layers of a model often have the same."""
    space: dict[str, Any] = {"__builtins__": builtins}  # by which C code that these lines call imports what it needs
    exec(compile(source, "<run of steps>", "exec"), space)  # the source holds no text of a file's
    bind: Callable[..., Filled] = space["bind"]
    return bind
