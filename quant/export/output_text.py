"""How the outputs of a plan stand in what the model returns, as JSON: for files that load without its code.

A form is the name of an output, null, `{"value": number or text}`, `{"tuple": [form, ...]}`, `{"list": [form, ...]}` or
`{"dict": [[key, form], ...]}`. A named tuple is a tuple, and an object of any other class a dictionary of its fields:
no class is imported because a file names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quant.export.naming import child_name, children_of
from quant.runtime.objects import Result
from quant.runtime.trees import Ref

KEYS = (str, int, float, bool)
"""Types of a dictionary's keys; others are written as text."""


def form_of(output: Any, name: str = "") -> Any:
    """The form of what a program returns, whose leaves have the names of `naming.named_leaves`."""
    if isinstance(output, Result):
        output = output.value
    if isinstance(output, Ref):
        return name or "output"
    children = children_of(output)
    if children is None:
        return None if output is None else {"value": output}
    forms = [(key, form_of(value, child_name(output, key, "", name))) for key, value in children]
    if isinstance(output, (tuple, list)):
        return {"list" if isinstance(output, list) else "tuple": [form for _, form in forms]}
    return {"dict": [[key if isinstance(key, KEYS) else str(key), form] for key, form in forms]}


def filled(form: Any, outputs: Mapping[str, Tensor]) -> Any:
    """The outputs as a form has them.

    Raises:
        KeyError, TypeError, ValueError: it is no form, or has an output that is not there.
    """
    if form is None:
        return None
    if isinstance(form, str):
        return outputs[form]
    [(kind, content)] = form.items()
    if kind == "value" and isinstance(content, KEYS):
        return content
    if kind in ("tuple", "list"):
        items = [filled(one, outputs) for one in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: filled(one, outputs) for key, one in content}
    raise ValueError(f"{kind!r} is no kind of output")


def form_of_names(names: tuple[str, ...]) -> Any:
    """The form of outputs that no model's code arranges: one alone, or a tuple."""
    return names[0] if len(names) == 1 else {"tuple": list(names)}
