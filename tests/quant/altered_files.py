"""Alterations of files, decided by draws: JSON at a place, tensors of safetensors files, bytes.

What carries checksums is sealed again where an alteration asks for it, as somebody would who wants to be believed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kernels.fuzzing import Draws

DEEP, WIDE, LONG = "@deep@", "@wide@", "@long@"
"""Stand in a document for what json.dumps writes slowly or not at all."""

WRITTEN = {DEEP: "[" * 100_000 + "]" * 100_000, WIDE: "[" + "0," * 100_000 + "0]", LONG: "1" + "0" * 5000}

HOSTILE: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 8, 16, 255, 256, 65536, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, 2**63, 2**64,
    -(2**63), 10**30, 10**400, 0.5, -0.5, 1e-45, 3.5e38, 1e308, float("nan"), float("inf"), -float("inf"), None, False,
    True, "", "a", "0", "-1", "1e400", "nan", "../../outside", "/etc/passwd", "a\0b", "\ud800", "é" * 300, "__class__",
    "forward", "os.system", "training", [], {}, [0], [1, 2], ["a"], [[]], [None], {"a": 0}, {"": {}}, [2**40], DEEP,
    WIDE, LONG,
)  # fmt: skip

WORDS = (
    "0", "1", "-1", "2", "7", "64", "255", "256", "65536", "2147483648", "9223372036854775807", "-9223372036854775808",
    "1e308", "inf", "nan", "0.5", "-", "None", "True", "%0", "%1", "%99", "$0", "$99", "@a.b", "@__class__", "float32",
    "int64", "?os:system", "&os:system", "&builtins:eval", "!subprocess:Popen", "!os:PathLike", "(", ")", "[", "]", "{",
    "builtins.eval", "os.system", "method __reduce__", "module", "torch.full", "torch.zeros", "torch.empty",
    "torch.load", "torch.save", "operator.pow", "builtins.getattr", "math.factorial",
)  # fmt: skip

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
    "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip

VALUES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\1\0\0\0")
"""Bytes of numbers, repeated over an element: zeros, ones, NaN, inf, the largest, the smallest."""


def dumps(document: Any) -> str:
    """Compact JSON of a document, in which DEEP, WIDE and LONG are written out."""
    text = json.dumps(document)
    for sign, written in WRITTEN.items():
        text = text.replace(json.dumps(sign), written)
    return text


def altered_json(document: Any, draws: Draws) -> tuple[Any, str]:
    """A document in which one place is another, and what was done; it is altered where it stands."""
    holder: dict[str, Any] = {"": document}
    container, key, path = holder, "", ""
    while True:
        value = container[key]
        if not isinstance(value, (dict, list)) or not value or draws.below(6) == 5:
            break
        container, key = value, draws.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path += f"/{key}"
    said = draws.choice(_JSON)(container, key, document, draws)
    return holder[""], f"{path or '/'}: {said}"


def _replace(container: Any, key: Any, document: Any, draws: Draws) -> str:
    container[key] = copy.deepcopy(draws.choice(HOSTILE))
    return f"{container[key]!r:.60}"


def _near(container: Any, key: Any, document: Any, draws: Draws) -> str:
    value = container[key]
    if isinstance(value, str):
        container[key] = altered_text(value, draws)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        half = value / 2 if abs(value) < 1 << 62 else value // 2  # an int beyond the reals has no half of them
        container[key] = draws.choice((value + 1, value - 1, -value, value * 2, half, value * 1000, str(value)))
    elif isinstance(value, list) and value:
        container[key] = draws.choice((value[:-1], value[::-1], [*value, value[0]], [value], value * 2))
    else:
        return _replace(container, key, document, draws)
    return f"{value!r:.60} is {container[key]!r:.60}"


def _remove(container: Any, key: Any, document: Any, draws: Draws) -> str:
    del container[key]
    if container == {}:
        container[""] = None  # the whole document
    return "removed"


def _rename(container: Any, key: Any, document: Any, draws: Draws) -> str:
    if isinstance(container, list):
        return _replace(container, key, document, draws)
    names = [*container, *(one for one in HOSTILE if isinstance(one, str)), f"{key}.x", f"{key}_"]
    name = draws.choice(names)
    if key == "":
        return _replace(container, key, document, draws)
    container[name] = container.pop(key)
    return f"renamed {name!r:.60}"


def _swap(container: Any, key: Any, document: Any, draws: Draws) -> str:
    """With the value of another place, anywhere."""
    other = document
    for _ in range(draws.below(6)):
        if not isinstance(other, (dict, list)) or not other:
            break
        other = other[draws.choice(list(other) if isinstance(other, dict) else range(len(other)))]
    container[key] = json.loads(json.dumps(other))
    return f"is {container[key]!r:.60}"


def _add(container: Any, key: Any, document: Any, draws: Draws) -> str:
    value = copy.deepcopy(draws.choice(HOSTILE))
    if isinstance(container, list):
        container.insert(key, value)
    else:
        container[draws.choice(("more", "forward", "__class__", "training", "0", f"{key}2"))] = value
    return f"beside it {value!r:.60}"


_JSON: tuple[Callable[[Any, Any, Any, Draws], str], ...] = (_replace, _near, _near, _remove, _rename, _swap, _add)


def altered_text(text: str, draws: Draws) -> str:
    """With a word, a sign or a line otherwise."""
    if not text:
        return draws.choice(WORDS)
    at = draws.below(len(text))
    begin, end = at, at
    while begin > 0 and _in_word(text[begin - 1]):
        begin -= 1
    while end < len(text) and _in_word(text[end]):
        end += 1
    how = draws.below(6)
    if how == 0:
        return text[:begin] + draws.choice(WORDS) + text[end:]
    if how == 1:
        other = draws.below(len(text))
        return text[:begin] + text[other : other + 1 + draws.below(16)] + text[end:]
    if how == 2:
        return text[:at] + text[at + 1 + draws.below(8) :]
    if how == 3:
        return text[:at] + draws.choice(WORDS) + text[at:]
    lines = text.split("\n")
    line = draws.below(len(lines))
    if how == 4:
        del lines[line]
    else:
        lines.insert(draws.below(len(lines) + 1), lines[line])
    return "\n".join(lines)


def _in_word(sign: str) -> bool:
    return sign.isalnum() or sign in "_.-%$@"


def altered_bytes(data: bytes, draws: Draws) -> tuple[bytes, str]:
    """With other bytes, fewer or more."""
    if not data:
        return b"\0", "a byte"
    how, changed = draws.below(6), bytearray(data)
    at = draws.below(len(data))
    if how == 0:
        return data[:at], f"cut after {at} bytes"
    if how == 1:
        del changed[at : at + 1 + draws.below(64)]
    elif how == 2:
        changed[at:at] = draws.choice((b"\0", b"\xff" * 8, b"[" * 2000, data[at : at + 100], b"{", b'"'))
    elif how == 3:
        changed[: min(8, len(changed))] = draws.choice((0, 1, 8, 2**16, 2**27, 2**31, 2**63, 2**64 - 1)).to_bytes(
            8, "little"
        )
    else:
        for _ in range(1 + draws.below(3)):
            at = draws.below(len(changed))
            changed[at] = draws.below(256) if how == 4 else changed[at] ^ 1 << draws.below(8)
    return bytes(changed), f"bytes: {how} at {at}"


@dataclass
class Stored:
    """A tensor of a safetensors file."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class SafeTensors:
    """A safetensors file in parts.

    Attributes:
        documents: what its metadata has that is JSON, parsed.
        texts: the other metadata.
    """

    tensors: dict[str, Stored]
    documents: dict[str, Any]
    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes) -> SafeTensors:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        documents = {key: json.loads(text) for key, text in metadata.items() if text.startswith(("{", "["))}
        texts = {key: text for key, text in metadata.items() if key not in documents}
        whole = data[8 + size :]
        tensors = {
            name: Stored(one["dtype"], one["shape"], whole[slice(*one["data_offsets"])]) for name, one in header.items()
        }
        return cls(tensors, documents, texts)

    def bytes(self, documents: Mapping[str, str], header: Callable[[dict[str, Any]], str] = dumps) -> bytes:
        """The file, with these texts of its documents."""
        place, entries, parts = 0, dict[str, Any](), []
        for name, one in self.tensors.items():
            entries[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [place, place + len(one.data)]}
            place += len(one.data)
            parts.append(one.data)
        if documents or self.texts:
            entries["__metadata__"] = {**self.texts, **documents}
        text = header(entries).encode("utf-8", "replace")
        text += b" " * (-len(text) % 8)
        return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def altered_tensors(file: SafeTensors, draws: Draws) -> str:
    """Alter a tensor so that the file stays a whole one; says what was done."""
    if not file.tensors:
        return "nothing"
    name = draws.choice(list(file.tensors))
    return f"{name}: {draws.choice(_TENSORS)(file.tensors, name, draws)}"


def _value(tensors: dict[str, Stored], name: str, draws: Draws) -> str:
    one = tensors[name]
    if not one.data:
        return _shape(tensors, name, draws)
    width, pattern = ITEM_BYTES.get(one.dtype, 1), draws.choice(VALUES)
    item = (pattern * 8)[:width] if len(pattern) <= width else pattern[-width:]
    if draws.one_in(2):
        one.data = (item * (len(one.data) // width + 1))[: len(one.data)]
        return f"all are {item!r}"
    at = draws.below(len(one.data) // width) * width
    one.data = one.data[:at] + item + one.data[at + width :]
    return f"{item!r} at {at // width}"


def _dtype(tensors: dict[str, Stored], name: str, draws: Draws) -> str:
    one = tensors[name]
    count = 1
    for size in one.shape:
        count *= size
    one.dtype = draws.choice(list(ITEM_BYTES))
    size = count * ITEM_BYTES[one.dtype]
    one.data = (one.data + bytes(size))[:size]
    return f"is {one.dtype}"


def _shape(tensors: dict[str, Stored], name: str, draws: Draws) -> str:
    one = tensors[name]
    shape, width = list(one.shape), ITEM_BYTES.get(one.dtype, 1)
    how = draws.below(7)
    if how == 0:
        shape = [*shape, 1]
    elif how == 1:
        shape = [1, *shape]
    elif how == 2:
        shape = shape[::-1]
    elif how == 3:
        shape = shape[1:]
    elif how == 4 and shape:
        shape[draws.below(len(shape))] = draws.choice((0, 1, 2, 3, 7, 64))
    elif how == 5 and shape:
        place = draws.below(len(shape))
        shape[place] += draws.choice((1, -1)) if shape[place] else 1
    else:
        shape = draws.choice(([], [0], [1], [2, 2], [2**40, 0], [0, 2**62], [1] * 12, [1] * 70))
    size = width
    for one_size in shape:
        size *= one_size
    one.shape, one.data = shape, (one.data + bytes(min(size, 1 << 20)))[:size]
    return f"has shape {shape}"


def _gone(tensors: dict[str, Stored], name: str, draws: Draws) -> str:
    del tensors[name]
    return "removed"


def _named(tensors: dict[str, Stored], name: str, draws: Draws) -> str:
    other = draws.choice((*tensors, "more", "../x", "", f"{name}.more", "_quant_constant/0", "_quant_constant//x",
                          "_quant_table/", "_quant_runner/0", "é?"))  # fmt: skip
    tensors[other] = tensors.pop(name)
    return f"is called {other!r}"


def _twice(tensors: dict[str, Stored], name: str, draws: Draws) -> str:
    other = draws.choice(list(tensors))
    tensors[name] = Stored(tensors[other].dtype, list(tensors[other].shape), tensors[other].data)
    return f"is {other}"


_TENSORS = (_value, _value, _dtype, _shape, _gone, _named, _twice)


def altered_header(file: SafeTensors, documents: Mapping[str, str], draws: Draws) -> tuple[bytes, str]:
    """The file with something else in the table of its tensors, which then need not fit the data."""
    said = ""

    def header(entries: dict[str, Any]) -> str:
        nonlocal said
        document, said = altered_json(entries, draws)
        return dumps(document)

    data = file.bytes(documents, header)
    return data, f"header {said}"


def seal_artefact(file: SafeTensors, sealed: bool) -> dict[str, str]:
    """The texts of a file of `quant.save`, with checksums of what is there."""
    texts = {key: dumps(one) for key, one in file.documents.items()}
    manifest = file.documents.get("octet")
    if sealed and isinstance(manifest, dict):
        # As a reader sees it: what is written out for a sign among it.
        try:
            whole = json.loads(texts["octet"])
            whole["checksums"] = {name: hashlib.sha256(one.data).hexdigest() for name, one in file.tensors.items()}
            whole["forms"] = {
                name: f"{DTYPES.get(one.dtype, one.dtype)} {list(one.shape)}" for name, one in file.tensors.items()
            }
            whole.pop("digest", None)
            whole["digest"] = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
            texts["octet"] = json.dumps(whole)
        except (RecursionError, ValueError, TypeError):
            pass
    runner = file.documents.get("octet_runner")
    if sealed and runner is not None:
        constants = runner.get("constants") if isinstance(runner, dict) else None
        for entry in constants if isinstance(constants, list) else ():
            held = (
                file.tensors.get(entry["tensor"]) if isinstance(entry, dict) and _is_text(entry.get("tensor")) else None
            )
            if held is not None and "crc32" in entry:
                entry["crc32"] = zlib.crc32(held.data)
        texts["octet_runner"] = dumps(runner)
        file.texts["octet_runner_crc32"] = str(zlib.crc32(texts["octet_runner"].encode("utf-8", "replace")))
    return texts


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


DTYPES = {
    "F64": "torch.float64", "F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16",
    "I64": "torch.int64", "I32": "torch.int32", "I16": "torch.int16", "I8": "torch.int8", "U8": "torch.uint8",
    "BOOL": "torch.bool", "U16": "torch.uint16", "U32": "torch.uint32", "U64": "torch.uint64",
    "F8_E4M3": "torch.float8_e4m3fn", "F8_E5M2": "torch.float8_e5m2", "C64": "torch.complex64",
}  # fmt: skip


def seal_checkpoint(key: str) -> Callable[[SafeTensors, bool], dict[str, str]]:
    """The same of a checkpoint, whose manifest has that name."""

    def seal(file: SafeTensors, sealed: bool) -> dict[str, str]:
        texts = {name: dumps(one) for name, one in file.documents.items()}
        if sealed and key in texts:
            seen = hashlib.sha256(texts[key].encode("utf-8", "replace"))
            for name in sorted(file.tensors):
                one = file.tensors[name]
                seen.update(f"{name} {DTYPES[one.dtype]} {list(one.shape)}".encode("utf-8", "replace"))
                seen.update(one.data)
            file.texts["digest"] = seen.hexdigest()
        return texts

    return seal


def plain(file: SafeTensors, sealed: bool) -> dict[str, str]:
    """Of a file without checksums."""
    return {key: dumps(one) for key, one in file.documents.items()}


def altered_safetensors(
    data: bytes, draws: Draws, seal: Callable[[SafeTensors, bool], dict[str, str]]
) -> tuple[bytes, str, bool]:
    """A safetensors file with something else in it, what, and whether its checksums are right again."""
    how = draws.below(10)
    if how == 9:
        return (*altered_bytes(data, draws), False)
    file, sealed = SafeTensors.read(data), not draws.one_in(12)
    said = []
    for _ in range(1 + draws.one_in(4)):
        if how < 6 and file.documents:
            key = draws.choice(list(file.documents))
            file.documents[key], what = altered_json(file.documents[key], draws)
            said.append(f"{key}{what}")
        else:
            said.append(altered_tensors(file, draws))
    if how == 8:
        altered, what = altered_header(file, seal(file, sealed), draws)
        return altered, "; ".join([*said, what]), True
    return file.bytes(seal(file, sealed)), "; ".join(said), sealed
