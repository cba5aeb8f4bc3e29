"""HTML as nested calls: whatever is not markup already is escaped, so that no layer's name can become a tag."""

from __future__ import annotations

import html

VOID = {"meta", "rect", "line", "circle", "polyline", "br"}
"""Elements that this package writes without content."""


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children and attribute values are escaped unless they are Markup; None among them is left out.

    A trailing underscore of an attribute's name is dropped and the others become hyphens: `class_`, `stroke_width`.
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    words = "".join(f' {key}="{html.escape(str(value), quote=True)}"' for key, value in pairs)
    if name in VOID:
        return Markup(f"<{name}{words}>" if name in ("meta", "br") else f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Children side by side."""
    return Markup("".join(str(c) if isinstance(c, Markup) else html.escape(str(c)) for c in children if c is not None))
