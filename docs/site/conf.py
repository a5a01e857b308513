"""The documentation as a site: `make docs` has Sphinx build it from the Markdown files as they lie.

The source directory is the root of the repository, so that links between docs/, examples/, systemd/
and README.md work here as they do where the files are read. The index decides the order: the links
below each of its headings are one part of the contents.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[2]
INDEX = "docs/index"
PARTS = {"docs", "examples", "systemd"}
PAGES = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}

HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\(([^)#:]+)\.md\)")
HTML_ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>$', re.MULTILINE)
COMMENT = re.compile(r"(?<=  )# (?!noqa|type:|--)")
PARAMETERS = re.compile(r"\bP\.(?:args|kwargs)\b")  # which Sphinx writes as ~typing.~P
CONTENTS = "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n"

project = "musterd"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = INDEX
exclude_patterns = sorted({path.name for path in ROOT.iterdir()} - PARTS - PAGES)
highlight_language = "text"  # of blocks that name none
suppress_warnings = ["misc.highlighting_failure"]  # of languages that Pygments does not know

myst_heading_anchors = 4

default_role = "code"  # docstrings say `name`
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"

toc_object_entries = False  # else each page has a contents of all of docs/api.md to copy and drop

html_theme = "furo"
html_title = "musterd"
html_static_path = ["static"]
html_css_files = ["musterd.css"]
html_additional_pages = {"index": "start.html"}
templates_path = ["templates"]
html_copy_source = False
html_show_copyright = False
html_domain_indices = False


def read(_app: Any, name: str, source: list[str]) -> None:
    """Add the contents to the index; make anchors of HTML known as targets of links."""
    source[0] = HTML_ANCHOR.sub(r"(\1)=", source[0])
    if name == INDEX:
        _, *parts = HEADING.split(source[0])
        for heading, text in zip(parts[::2], parts[1::2], strict=True):
            pages = [f"{title} <{page}>" for title, page in LINK.findall(text)]
            source[0] += CONTENTS.format(heading, "\n".join(pages))


def describe(_app: Any, kind: str, *given: Any) -> None:
    """Read a docstring as our code writes it: what is indented is code."""
    lines: list[str] = given[-1]
    for number in range(len(lines) - 1, 1, -1):
        text, blank, above = lines[number], lines[number - 1], lines[number - 2]
        if text.startswith("    ") and not blank and above and not above.startswith("    "):
            lines[number:number] = ["::", ""]
    if kind == "attribute":
        lines[:] = [line.replace("*", "\\*") for line in lines]


def read_comments() -> None:
    """Have a comment behind an attribute, or above it, be what there is to say about it."""
    init = ModuleAnalyzer.__init__

    def init_with_comments(self: ModuleAnalyzer, source: str, *args: Any) -> None:
        init(self, PARAMETERS.sub("Any", COMMENT.sub("#: ", source)), *args)

    ModuleAnalyzer.__init__ = init_with_comments  # type: ignore[method-assign]


def setup(app: Any) -> dict[str, bool]:
    read_comments()
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", describe)
    return {"parallel_read_safe": True}
