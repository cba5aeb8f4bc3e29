"""Comparisons with string literals, read from the source: a text that decides what the program does.

What something is, its type or its identity says: `node.kind is Kind.MODULE`, `isinstance(step.operator, Float)`,
`function in SIZES`. A text decides rightly where it comes from outside and nothing else tells its meaning; `ALLOWED`
lists these places, by the reason.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .sources import File

FOREIGN = {"torch", "numpy"}
"""Packages whose code is not the user's."""

SETTINGS = {
    "activation_observer", "activation_options", "activation_symmetric", "weight_observer", "weight_options",
}  # fmt: skip
"""Fields of a `QConfig`."""

ALLOWED: dict[str, dict[str, set[str]]] = {
    "files and programs are texts, and so are commands and pages": {
        "quant/artefact/*": {"*"},
        "quant/autoquant/records.py": {"*"},
        "quant/shards/load.py": {"F32", "BF16", "F16"},
        "quant/shards/reader.py": {"*"},
        "quant/integrations/transformers_quantizer.py": {"auto", "cpu"},
        "quant/cli/*": {"*"},
        "quant/page/*": {"*"},
        "quant/onnx/*": {"*"},
        "quant/migrate/pt2e_program.py": {"*"},
        "quant/*_reader.py": {"*"},
        "quant/*_text.py": {"*"},
        "quant/runtime/allowed_functions.py": {"*"},
        "quant/report.py": {"float"},
        "quant/rounding/checkpoint.py": {"model", "data"},
        "quant/error_parts.py": {"e"},
    },
    "the one name that prepare adds to a module": {
        "quant/forward_state.py": {"_quant"},
        "quant/static/dynamic_fallback.py": {"_quant"},
    },
    "settings that the user gives by name": {
        "quant/recipe.py": {"auto", "minmax", "weight"},
        "quant/recipe_check.py": SETTINGS | {"per_row", "group_size", "weight_symmetric"},
        "quant/dynamic_decisions.py": {"activation_observer", "activation_options", "activation_symmetric"},
        "quant/nn/base.py": {"auto"},
        "quant/nn/recurrent/sequence.py": {"auto"},
        "quant/diagnosis.py": {"auto", "histogram"},
        "quant/post_training.py": {"nearest"},
        "quant/rounding/methods.py": {"nearest"},
        "quant/dynamic_rounding.py": {"nearest"},
        "quant/reconstruction/learn.py": {"block"},
    },
    "settings of torch's layers and functions": {
        "quant/ops/conv.py": {"valid", "same", "zeros"},
        "quant/runtime/module_calls.py": {"none"},
        "quant/ops/resize.py": {"nearest", "nearest-exact", "linear", "bilinear", "trilinear"},
        "quant/ops/views.py": {"size"},
        "quant/heard_calls.py": {"dtype"},
        "quant/static/module_replacement.py": {"input"},
        "quant/migrate/dynamic_layers.py": {"sum"},
    },
    "methods of tensors and operators of libraries, which are called by their names": {
        "quant/ops/views.py": {"view", "view_as"},
        "quant/ops/shapes.py": {"size"},
        "quant/capture/calls.py": {"torchvision::nms"},
        "quant/migrate/matched_values.py": {"*"},
    },
    "names of attributes and parameters of torch's modules": {
        "quant/capture/module_state.py": {"_parameters", "_buffers", "_modules", "training", "forward"},
        "quant/capture/scripted.py": {"training"},
        "quant/copying.py": {"u"},
        "quant/migrate/packed_layers.py": {
            "weight",
            "_packed_params._packed_params",
            "_packed_params._packed_weight",
            "_all_weight_values",
        },
        "quant/runtime/layers/weighted.py": {"bias"},
        "quant/runtime/layers/recurrent_module.py": {"weight_ih", "weight_hh", "weight_hr", "bias_ih"},
        "quant/nn/recurrent/sequence.py": {"weight_ih_l0", "weight_ih_l0_reverse"},
        "quant/static/dynamic_fallback.py": {"forward"},
        "quant/uncompiled.py": {"_orig_mod"},
    },
    "names that Python gives to attributes and packages": {
        "quant/capture/attribute_reads.py": {"self"},
        "quant/capture/executed_lines.py": {"line", "return", "__del__"},
        "quant/capture/forward_code.py": {*FOREIGN, "%", "%=", "BINARY_OP", "BINARY_MODULO", "INPLACE_MODULO"},
        "quant/capture/outer_objects.py": FOREIGN,
        "quant/capture/range_steps.py": {"*"},
        "quant/capture/counts.py": {"*"},
        "quant/capture/instructions.py": {"*"},
        "quant/capture/places.py": FOREIGN,
        "quant/graph_modules.py": {"*"},
        "quant/leaves.py": {"*"},
        "quant/runtime/dtype_branches.py": {"*"},
        "quant/nn/inherited.py": {"torch", "_abc_impl"},
        "quant/runtime/forms.py": {"builtins"},
        "quant/runtime/objects.py": {"__dict__", "__weakref__"},
        "quant/static/fingerprint.py": {*FOREIGN, "_", "forward"},
        "quant/static/signature.py": {"inplace", "p"},
    },
}
"""Reason -> file, or pattern -> the texts that it may compare with; "*" is all."""

ELSEWHERE = ("device.type", "dtype.kind", "instruction.opname")
"""What torch, numpy and `dis` have as texts alone."""


@dataclass(frozen=True)
class Comparison:
    """One comparison with a text.

    Attributes:
        file: relative to the checkout.
        text: one of those that it compares with.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} compares with {self.text!r}"


def comparisons(sources: Iterable[File]) -> list[Comparison]:
    """Comparisons with literal texts, or with tables of them, but for questions whether a mapping has a key."""
    parsed = [(one, ast.parse(one.text)) for one in sources]
    tables = {one.module: dict(_tables(tree)) for one, tree in parsed}
    return [
        Comparison(one.path, getattr(node, "lineno", 0), text)
        for one, tree in parsed
        for node in ast.walk(tree)
        for text in sorted(_compared(node, {**tables[one.module], **_imported(tree, tables)}))
    ]


def unlisted(found: Iterable[Comparison]) -> list[Comparison]:
    """Those that `ALLOWED` does not have."""
    return [one for one in found if not any(_allows(one, place, texts) for place, texts in _places())]


def unused(found: Iterable[Comparison]) -> list[str]:
    """Entries of `ALLOWED` that no comparison needs."""
    found = list(found)
    entries = [(place, text) for place, texts in _places() for text in texts]
    return [f"{place}: {text!r}" for place, text in entries if not any(_allows(one, place, {text}) for one in found)]


def _places() -> Iterator[tuple[str, set[str]]]:
    for files in ALLOWED.values():
        yield from files.items()


def _allows(one: Comparison, place: str, texts: set[str]) -> bool:
    return fnmatch.fnmatch(one.file, place) and (one.text in texts or "*" in texts)


def _tables(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """The constants of a module that are texts, or collections of texts."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            texts = _texts(node.value)
            yield from ((target.id, texts) for target in targets if isinstance(target, ast.Name) and texts)


def _imported(tree: ast.Module, tables: dict[str, dict[str, set[str]]]) -> dict[str, set[str]]:
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    aliases = [(tables.get(node.module or "", {}), alias) for node in imports for alias in node.names]
    return {alias.asname or alias.name: known[alias.name] for known, alias in aliases if alias.name in known}


def _compared(node: ast.AST, tables: dict[str, set[str]]) -> set[str]:
    if isinstance(node, ast.MatchValue):
        return _texts(node.value)
    if not isinstance(node, ast.Compare):
        return set()
    sides = [node.left, *node.comparators]
    if any(ast.unparse(side).endswith((*ELSEWHERE, "__name__")) for side in sides):
        return set()
    found: set[str] = set()
    for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
        if isinstance(operator, (ast.Eq, ast.NotEq)):
            found |= {text for side in (left, right) for text in _named(side, tables) or _texts(side)}
        elif isinstance(operator, (ast.In, ast.NotIn)):
            found |= _named(right, tables) or _texts(right)
            # Whether a mapping has a key is asked by an identifier; a sign is looked for in a text.
            found |= {text for text in _texts(left) if not text.isidentifier() or len(text) == 1}
    return found - {""}


def _named(node: ast.expr, tables: dict[str, set[str]]) -> set[str]:
    return tables.get(node.id, set()) if isinstance(node, ast.Name) else set()


def _texts(node: ast.expr) -> set[str]:
    """The texts that an expression is, or is a collection of."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return {text for element in node.elts for text in _texts(element)}
    if isinstance(node, ast.Dict):
        return {text for key in node.keys if key is not None for text in _texts(key)}
    if isinstance(node, ast.BinOp):
        return _texts(node.left) | _texts(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset", "tuple"):
        return {text for argument in node.args for text in _texts(argument)}
    return set()
