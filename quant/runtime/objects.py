"""Values of any class as trees: what a forward may take, change and return, with a place for each tensor in it.

`opened` turns a user's value into nested tuples, lists, dicts, dataclasses and, for objects of other classes that hold
tensors, `Instance`. `built` turns such a tree back. Neither knows what stands at the leaves.
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
    """An object by its class, its attributes, and its items where the class is a list, tuple or dict besides.

    Attributes:
        kind: its class.
        attributes: of its `__dict__` and its slots, by name; nested.
        items: of a subclass of list, tuple or deque its items, of a dict its pairs; None of others.
    """

    kind: type
    attributes: dict[str, Any]
    items: Any = None


@dataclass(frozen=True)
class Given:
    """An object that the caller gave: the argument it came in, and the steps from there to it.

    Attributes:
        argument: name of the argument.
        path: of each step whether it is an attribute, and its name, index or key.
    """

    argument: str
    path: tuple[tuple[bool, Any], ...] = ()


@dataclass(frozen=True)
class Write:
    """What a forward left in something that outlives the call.

    Attributes:
        target: an object that the caller gave, or the dotted name of a module's attribute.
        value: of an attribute its new value; of an object its new content, as `content` gives it. Nested.
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
"""What is never looked into."""


def has_own_form(kind: type) -> bool:
    """Whether `map_leaves` takes values of this class apart and makes them again by itself."""
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
    """The attributes of an object, of its slots too."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def items_of(value: Any) -> Any:
    """The items of a list, tuple or deque, the pairs of a dict; None of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (list, tuple, collections.deque)) else None


def opened(value: Any, wanted: Callable[[Any], bool]) -> Any:
    """`value` with `Instance` for objects in which, at any depth, something is wanted; other objects stay leaves."""
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
    """Whether, in a value, something that holds what is wanted is a part of itself: no tree stands for such a value."""
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
            found = [walk(one) for one in inside]  # all of them: a later one may hold what came before
            holds[key] = any(found)
            around.discard(key)
        return holds[key]

    walk(value)
    return any(holds[key] for key in again)


def _open_own_form(value: Any, wanted: Callable[[Any], bool], inside: tuple[int, ...]) -> Any:
    """A dataclass, made again only where it holds an object that is opened: its constructor may have a say."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    parts = {name: _open(part, wanted, inside) for name, part in fields.items()}
    same = all(parts[name] is part or type(part) in (tuple, list, dict) for name, part in fields.items())
    opened_inside = any(type(part) is Instance for part in walk(parts))
    return value if same and not opened_inside else type(value)(**parts)


def _is_struct(kind: type) -> bool:
    """Whether a class is a tuple with names of C's, as what torch.max gives."""
    return issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields")


def walk(tree: Any) -> Iterator[Any]:
    """All parts of nested values, each container before what it holds."""
    yield tree
    for part in _parts(tree) or ():
        yield from walk(part)


_LEAVES = frozenset({type(None), bool, int, float, str, Tensor})
"""Asked first: what nearly all parts are that hold nothing."""


def _parts(tree: Any) -> Iterable[Any] | None:
    """What a container holds; None of anything else."""
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
    """Whether nested places have objects that `trees.settled` is to build."""
    return any(type(part) in (Instance, Given) for part in walk(tree))


def built(instance: Instance) -> Any:
    """The object that an `Instance` without open places describes."""
    kind: Any = instance.kind
    if issubclass(kind, tuple):
        made = tuple.__new__(kind, instance.items)
    elif kind is types.MappingProxyType:  # which only its constructor makes, and nothing fills
        return kind(instance.items)
    else:
        made = kind.__new__(kind)
    fill(made, instance.attributes, None if issubclass(kind, tuple) else instance.items)
    return made


def fill(target: Any, attributes: Mapping[str, Any], items: Any) -> None:
    """Make an object's attributes and items these and no others."""
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


def containers(value: Any, given: Given, found: dict[int, tuple[Any, Given]], wanted: Callable[[Any], bool]) -> None:
    """Collect the lists, dicts and objects in an argument that a forward might change, by id, with their places."""
    if isinstance(value, OPAQUE) or id(value) in found or wanted(value):
        return
    if not isinstance(value, tuple):
        if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__") and items_of(value) is None:
            return
        found[id(value)] = (value, given)
    for name, item in attributes_of(value).items():
        containers(item, Given(given.argument, (*given.path, (True, name))), found, wanted)
    items = items_of(value)
    pairs = items.items() if isinstance(items, dict) else enumerate(items or ())
    for key, item in pairs:
        containers(item, Given(given.argument, (*given.path, (False, key))), found, wanted)


def content(value: Any) -> tuple[dict[str, Any], Any]:
    """What `fill` sets: an object's attributes and its items."""
    return attributes_of(value), items_of(value)


def at(arguments: Mapping[str, Any], given: Given) -> Any:
    """The object in a call's arguments."""
    found = arguments[given.argument]
    for is_attribute, key in given.path:
        found = getattr(found, key) if is_attribute else found[key]
    return found


def compares_itself(kind: type) -> bool:
    """Whether a class says when two of its objects are equal, rather than being equal to themselves alone."""
    return any("__eq__" in vars(one) for one in kind.__mro__[:-1])
