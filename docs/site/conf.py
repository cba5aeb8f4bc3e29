"""The documentation site: Sphinx with MyST's Markdown and the theme furo. `make docs` builds it, warnings as errors.

Every public docstring is read as Google's style. Within one, text between single backticks is code, and a link where
it names something public; `|` and `*` stand for themselves, as in the derivations.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import quant
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from quant.cli import make_parser
from sphinx.application import Sphinx

DRAWINGS = Path(__file__).parents[1] / "drawings"

project = "Octet"
author = "The authors of Octet"
version = release = quant.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["drawings/*", "site/*"]
default_role = "py:obj"
smartquotes_action = "D"  # dashes alone: two apostrophes are an empty string

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Buffers", "Parameters")]

html_theme = "furo"
html_title = f"Octet {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


CODE = re.compile(r"(``.*?``|`[^`]*`)")
SECTION = re.compile(r"\w+:$")
OPTION = re.compile(r"(?<!\S)--[\w-]+")  # smart quotes would make a dash of its first two signs


def escape_signs(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Let `|` and `*` outside of code stand for themselves; reStructuredText takes them for markup."""
    code: int | None = None  # the indent of the paragraph whose `::` begins a block of code
    for index, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line and code is not None and indent <= code:
            code = None
        if code is None:
            parts = CODE.split(line)
            lines[index] = "".join(p if p.startswith("`") else re.sub(r"([|*])", r"\\\1", p) for p in parts)
            if line.endswith("::"):
                code = indent


def show_values(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show a default by its value where the source names a constant for it that is a text or a number."""
    known = getattr(inspect.unwrap(obj.__init__ if isinstance(obj, type) else obj), "__globals__", {})

    def value(default: re.Match[str]) -> str:
        constant = known.get(default[1])
        return f" = {constant!r}" if isinstance(constant, (str, int, float)) else default[0]

    return signature and re.sub(r" = ([A-Z][A-Z_]*)\b", value, signature), returned


def mark_code(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Say `::` before an indented block that is no section, as the code of an example: reStructuredText wants it."""
    marked: list[str] = []
    paragraph = ""
    for line in lines:
        begins = line.startswith("    ") and marked and not marked[-1]
        if begins and not paragraph.startswith(" ") and not SECTION.match(paragraph):
            marked += ["::", ""]
        marked.append(line)
        paragraph = line or paragraph
    lines[:] = marked


PROPERTIES: dict[str, list[str]] = {}


def hide_property(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Take a property's text out of the way of napoleon, which reads what stands before a colon as its type."""
    if what == "property":
        PROPERTIES[name] = lines[:]
        lines.clear()


def show_property(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Put it back."""
    if what == "property":
        lines[:] = PROPERTIES[name]


def keep_inside(app: Sphinx, document: str, source: list[str]) -> None:
    """Let links to the README, which is no page, lead to the first page."""
    source[0] = source[0].replace("](../README.md)", "](index.md)")


INLINE = re.compile(r'<code class="[^"]*literal[^"]*">.*?</code>', re.DOTALL)
NAME = re.compile(r'(?<=<span class="pre">)[^<]+')


def break_names(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Mark where code may break, behind dots and underscores: where it is long, or in a table on a phone (site.css)."""

    def mark(name: re.Match[str]) -> str:
        place = '<wbr class="long">' if len(name[0]) > 30 else "<wbr>"
        return re.sub(r"(?:(?<=[_(=/])|(?<=\.)(?=\w{4}))(?=[\w{\[&])|(?<=[a-z])(?=[A-Z])", place, name[0])

    context["body"] = INLINE.sub(lambda code: NAME.sub(mark, code[0]), context.get("body", ""))


class Drawing(Directive):
    """An SVG of drawings.py, put into the page, so that its colours follow the page's light or dark theme.

    The argument is the drawing's name; the content is the caption.
    """

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = DRAWINGS / f"{self.arguments[0]}.svg"
        self.state.document.settings.record_dependencies.add(str(path))
        figure = nodes.container(classes=["drawing"])
        figure += nodes.raw("", path.read_text(encoding="utf-8"), format="html")
        caption = nodes.container(classes=["drawing-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        return [figure, caption]


class Options(Directive):
    """The arguments of a command of `quant`, from the parser itself. The argument is the command's name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        [verbs] = [action for action in make_parser()._actions if isinstance(action.choices, dict)]
        parser = verbs.choices[self.arguments[0]]
        formatter = parser._get_formatter()
        lines: list[str] = []
        for action in parser._actions:
            if action.dest != "help":
                lines += [
                    f"`{formatter._format_action_invocation(action)}`",
                    ": " + OPTION.sub(r"`\g<0>`", formatter._expand_help(action)),
                    "",
                ]
        part = nodes.container(classes=["options"])
        self.state.nested_parse(StringList(lines), self.content_offset, part)
        return [part]


def setup(app: Sphinx) -> None:
    # Napoleon, which makes markup of its own, has priority 500.
    app.connect("autodoc-process-docstring", mark_code, priority=300)
    app.connect("autodoc-process-docstring", escape_signs, priority=400)
    app.connect("autodoc-process-docstring", hide_property, priority=450)
    app.connect("autodoc-process-docstring", show_property, priority=550)
    app.connect("autodoc-process-signature", show_values)
    app.connect("source-read", keep_inside)
    app.connect("html-page-context", break_names)
    app.add_directive("drawing", Drawing)
    app.add_directive("options", Options)
