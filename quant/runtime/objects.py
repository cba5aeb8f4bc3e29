"""Objects of any class as trees, so that arguments, outputs and writes of a forward may be of the user's classes.

`opened` turns a value into nested tuples, lists, dicts, dataclasses and, for objects of other classes that hold
tensors, `Instance`. `built` turns an `Instance` back into an object. Leaves may be anything.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Instance:
    """An object of a class that is not a plain container, taken apart.

    Attributes:
        kind: its class.
        attributes: those of its `__dict__` and its slots, by name; nested.
        items: the items of a subclass of list, tuple or deque, the pairs of a subclass of dict; else None.
    """

    kind: type
    attributes: dict[str, Any]
    items: Any = None


@dataclass(frozen=True)
class Given:
    """The place of an object of the caller's: an argument of the call, and the way from there to the object.

    Attributes:
        argument: name of the argument.
        path: for each step, whether it is an attribute, and its name, index or key.
    """

    argument: str
    path: tuple[tuple[bool, Any], ...] = ()


@dataclass(frozen=True)
class Write:
    """A value that a forward writes on an argument or on a module, to be written after each run.

    Attributes:
        target: an object that the caller gave, or the dotted name of a module's attribute.
        value: the attribute's new value; or the object's new content, as `content` returns it. Nested.
    """

    target: Given | str
    value: Any


@dataclass(frozen=True)
class Result:
    """An output that is more than nested tensors: it holds objects to build, or comes with writes."""

    value: Any
    writes: tuple[Write, ...] = ()


PLAIN_CONTAINERS = (tuple, list, dict, collections.OrderedDict, torch.Size, PackedSequence)
OPAQUE = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
          enum.Enum, weakref.ReferenceType, str, bytes, int, float, complex, type(None), torch.dtype, torch.device,
          torch.layout, torch.memory_format, torch.Generator)  # fmt: skip
"""Classes whose objects are leaves, whatever they hold."""


def has_own_form(kind: type) -> bool:
    """Whether `map_leaves` itself takes values of this class apart and builds them again."""
    if kind in PLAIN_CONTAINERS or kind is slice or _is_struct(kind):
        return True
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return True
    if not dataclasses.is_dataclass(kind):
        return False
    fields = dataclasses.fields(kind)
    # What a constructor computes anew may not be what the object held.
    simple = all(field.init for field in fields) and not hasattr(kind, "__slots__")
    return issubclass(kind, Mapping) or (simple and not hasattr(kind, "__post_init__"))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def items_of(value: Any) -> Any:
    """The items of a list, tuple or deque, the pairs of a dict; None of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (list, tuple, collections.deque)) else None


def opened(value: Any, wanted: Callable[[Any], bool]) -> Any:
    """Take apart the objects in `value` that hold a wanted leaf at any depth; other objects stay leaves.

    Args:
        value: nested containers and objects.
        wanted: whether a part is a leaf to be reached, such as a tensor.

    Returns:
        the same containers, with `Instance` in the place of each object taken apart.
    """
    return _open(value, wanted, ())


def _open(value: Any, wanted: Callable[[Any], bool], around: tuple[int, ...]) -> Any:
    kind = type(value)
    if wanted(value) or isinstance(value, OPAQUE) or id(value) in around:
        return value
    inside = (*around, id(value))
    if kind in (tuple, list, torch.Size):
        return kind(_open(item, wanted, inside) for item in value)
    if kind in (dict, collections.OrderedDict):
        return kind((key, _open(item, wanted, inside)) for key, item in value.items())
    if kind is slice or kind is PackedSequence or _is_struct(kind):
        return value
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*(_open(item, wanted, inside) for item in value))
    if has_own_form(kind):
        return _open_own_form(value, wanted, inside)
    if not hasattr(value, "__dict__") and not hasattr(kind, "__slots__") and items_of(value) is None:
        return value
    attributes = {name: _open(item, wanted, inside) for name, item in attributes_of(value).items()}
    items = _open(items_of(value), wanted, inside)
    if not any(wanted(part) for part in walk((attributes, items)) if _parts(part) is None):
        return value
    return Instance(kind, attributes, items)


def holds_itself(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether `value` has a cycle through an object that holds a wanted leaf; such a value is no tree."""
    holds: dict[int, bool] = {}
    around: set[int] = set()
    again: set[int] = set()

    def walk(part: Any) -> bool:
        if wanted(part) or isinstance(part, OPAQUE):
            return wanted(part)
        key = id(part)
        if key in around:
            again.add(key)
            return False
        if key not in holds:
            around.add(key)
            items = items_of(part)
            inside = [*attributes_of(part).values(), *(items.values() if isinstance(items, dict) else items or ())]
            reached = [walk(one) for one in inside]  # all of them: a later one may hold what came before
            holds[key] = any(reached)
            around.discard(key)
        return holds[key]

    walk(value)
    return any(holds[key] for key in again)


def _open_own_form(value: Any, wanted: Callable[[Any], bool], inside: tuple[int, ...]) -> Any:
    """A dataclass, constructed anew only where a part of it is opened: its constructor may have effects."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    parts = {name: _open(part, wanted, inside) for name, part in fields.items()}
    same = all(parts[name] is part or type(part) in (tuple, list, dict) for name, part in fields.items())
    opened_inside = any(type(part) is Instance for part in walk(parts))
    return value if same and not opened_inside else type(value)(**parts)


def _is_struct(kind: type) -> bool:
    """Whether a class is a struct sequence of C, as the result of torch.max is."""
    return issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields")


def walk(tree: Any) -> Iterator[Any]:
    """All parts of a nested value; a container comes before its parts."""
    yield tree
    for part in _parts(tree) or ():
        yield from walk(part)


_LEAVES = frozenset({type(None), bool, int, float, str, Tensor})
"""The classes of most leaves, checked first for speed."""


def _parts(tree: Any) -> Iterable[Any] | None:
    """The parts of a container; None for any other value."""
    if type(tree) in _LEAVES:
        return None
    if type(tree) is Instance:
        return tree.attributes, tree.items
    if isinstance(tree, (list, tuple)):
        return tree
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, slice):
        return tree.start, tree.stop, tree.step
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name, None) for field in dataclasses.fields(tree)]
    return None


def holds_objects(tree: Any) -> bool:
    """Whether nested places hold an `Instance` or `Given`, which `trees.settled` turns into objects."""
    return any(type(part) in (Instance, Given) for part in walk(tree))


def built(instance: Instance) -> Any:
    """Build the object that an `Instance` describes; its leaves are real values."""
    kind: Any = instance.kind
    if issubclass(kind, tuple):
        result = tuple.__new__(kind, instance.items)
    elif kind is types.MappingProxyType:  # read-only: only its constructor sets its content
        return kind(instance.items)
    else:
        result = kind.__new__(kind)
    fill(result, instance.attributes, None if issubclass(kind, tuple) else instance.items)
    return result


def fill(target: Any, attributes: Mapping[str, Any], items: Any) -> None:
    """Set an object's attributes and items; those not named are removed."""
    own = getattr(target, "__dict__", None)
    if own is not None:
        for name in set(own) - set(attributes):
            del own[name]
    for name, value in attributes.items():
        if own is not None and not isinstance(getattr(type(target), name, None), types.MemberDescriptorType):
            own[name] = value
        else:
            object.__setattr__(target, name, value)
    if isinstance(target, collections.OrderedDict):
        collections.OrderedDict.clear(target)
        for key, value in items.items():
            collections.OrderedDict.__setitem__(target, key, value)
    elif isinstance(target, dict):
        dict.clear(target)
        dict.update(target, items)
    elif isinstance(target, list):
        list.__setitem__(target, slice(None), items)
    elif isinstance(target, collections.deque):
        target.clear()
        target.extend(items)


def containers(value: Any, given: Given, objects: dict[int, tuple[Any, Given]], wanted: Callable[[Any], bool]) -> None:
    """Collect the mutable objects in an argument.

    Args:
        value: the argument, or a part of it.
        given: the place of `value`.
        objects: id -> (object, its place); the objects are added here.
        wanted: as for `opened`; such leaves are not collected.
    """
    if isinstance(value, OPAQUE) or id(value) in objects or wanted(value):
        return
    if not isinstance(value, tuple):
        if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__") and items_of(value) is None:
            return
        objects[id(value)] = (value, given)
    for name, item in attributes_of(value).items():
        containers(item, Given(given.argument, (*given.path, (True, name))), objects, wanted)
    items = items_of(value)
    pairs = items.items() if isinstance(items, dict) else enumerate(items or ())
    for key, item in pairs:
        containers(item, Given(given.argument, (*given.path, (False, key))), objects, wanted)


def content(value: Any) -> tuple[dict[str, Any], Any]:
    """An object's attributes and items, as `fill` sets them."""
    return attributes_of(value), items_of(value)


def at(arguments: Mapping[str, Any], given: Given) -> Any:
    """The object at a place in a call's arguments."""
    value = arguments[given.argument]
    for is_attribute, key in given.path:
        value = getattr(value, key) if is_attribute else value[key]
    return value


def compares_itself(kind: type) -> bool:
    """Whether a class defines equality, so that two objects may be equal."""
    return any("__eq__" in vars(one) for one in kind.__mro__[:-1])
