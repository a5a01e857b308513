"""Extract named values from an HTML page: CSS by selectolax, XPath by lxml.

A selection is written as one string:

    h1                      the text of the first match, its descendants included
    css:.price              the same; `css:` is the default engine
    h1::text                only the element's own text, without that of its children
    a.promo::attr(href)     an attribute of the first match that has it
    xpath://h1/text()       XPath 1.0; elements give their text, numbers and booleans a string
    []li.promo              all matches, as a list; works with every form above

Without a match the value is None, or an empty list behind `[]`. Text loses the white space around
it, attributes are left as they are.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from lxml import etree
from msgspec import Struct
from selectolax.lexbor import (
    LexborDocumentOptions,
    LexborHTMLParser,
    LexborNode,
    SelectolaxError,
)

from musterd.ipc.wire.messages import RESULT_BYTES_MAX
from musterd.workers.authoring.base import Permanent

Value = str | list[str] | None

_SUFFIX = re.compile(r"::(?:(text)|attr\(\s*([^\s()]+)\s*\))\s*$")
_STRING = etree.XPath("string()")  # an element's text without its comments

# Every selector is tried on this page before any page is fetched: one element is enough for an
# engine to look at every part of an expression.
_PROBE = "<html><body><p>probe</p></body></html>"


class InvalidSelector(Permanent):
    """The engine cannot read the selector; no page would make it valid."""


class ExtractTooLarge(Permanent):
    """The selected text would not fit into a task's result."""


class PageTooDeep(Permanent):
    """The page is nested more deeply than the XPath engine can read."""


class Selector(Struct, frozen=True):
    """One entry of `select`, split into its parts."""

    name: str
    written: str
    query: str
    xpath: bool = False
    many: bool = False
    own_text: bool = False
    attribute: str = ""


class Page:
    """HTML text, parsed at most once by each engine and only when needed."""

    def __init__(self, html: str) -> None:
        # Lone surrogates (from scripts in a browser) cannot be encoded; both engines want UTF-8.
        self._data = html.encode("utf-8", "replace")
        self._css: LexborHTMLParser | None = None
        self._xpath: etree._Element | None = None
        self._room = RESULT_BYTES_MAX

    def value(self, selector: Selector) -> Value:
        """Return the selected text, a list of texts behind `[]`, None without a match."""
        texts = self._by_xpath(selector) if selector.xpath else self._by_css(selector)
        if selector.many:
            return [self._counted(selector, text) for text in texts]
        first = next(iter(texts), None)
        return None if first is None else self._counted(selector, first)

    def _counted(self, selector: Selector, text: str) -> str:
        # `[]*` repeats a text once per ancestor: stop before memory runs out.
        self._room -= len(text)
        if self._room < 0:
            raise ExtractTooLarge(
                f"selector {selector.name}={selector.written!r} brings the result over "
                f"{RESULT_BYTES_MAX} characters; select less"
            )
        return text

    def _by_css(self, selector: Selector) -> Iterator[str]:
        if self._css is None:
            # Without events: each <option> would have its <select> look at all the others.
            self._css = LexborHTMLParser(self._data, options=LexborDocumentOptions.WO_EVENTS.value)
        try:
            nodes = self._css.css(selector.query)
        except SelectolaxError as error:
            raise _invalid(selector, str(error).rstrip(".")) from error
        return _css_texts(selector, nodes)

    def _by_xpath(self, selector: Selector) -> Iterator[str]:
        if self._xpath is None:
            # The text is decoded already: a charset in the page must not count again.
            parser = etree.HTMLParser(encoding="utf-8", huge_tree=True)
            root = etree.fromstring(self._data, parser)
            if any(error.type_name == "ERR_RESOURCE_LIMIT" for error in parser.error_log):
                # libxml2 leaves out what is inside, and says so only in its log.
                raise PageTooDeep(
                    "the page is nested too deeply for XPath, which reads about 2,000 levels; "
                    "select with CSS"
                )
            self._xpath = etree.Element("html") if root is None else root
        try:
            found = etree.XPath(selector.query)(self._xpath)
        except etree.XPathError as error:
            raise _invalid(selector, str(error)) from error
        return _xpath_texts(found)


def _invalid(selector: Selector, reason: str) -> InvalidSelector:
    return InvalidSelector(f"selector {selector.name}={selector.written!r} is invalid: {reason}")


def _css_texts(selector: Selector, nodes: Iterable[LexborNode]) -> Iterator[str]:
    for node in nodes:
        if not selector.attribute:
            yield node.text(deep=not selector.own_text).strip()
        elif selector.attribute in node.attributes:
            yield node.attributes[selector.attribute] or ""  # None is `<a download>`


def _xpath_texts(found: Any) -> Iterator[str]:
    if isinstance(found, bool):
        yield "true" if found else "false"
    elif isinstance(found, float):
        yield f"{found:.15g}"
    elif isinstance(found, str):
        yield str(found).strip()
    else:
        for item in found:
            if isinstance(item, str):  # text() or @attribute
                yield str(item) if getattr(item, "is_attribute", False) else str(item).strip()
            elif isinstance(item, etree._Element):
                yield str(_STRING(item)).strip()
            # else a namespace node, which has no text


def parse_selector(name: str, written: str) -> Selector:
    """Split one selector into its parts; `compile_selectors` checks it."""
    many = written.startswith("[]")
    query = (written[2:] if many else written).strip()
    if query.startswith("xpath:"):
        return Selector(name, written, query.removeprefix("xpath:").strip(), xpath=True, many=many)
    query = query.removeprefix("css:").strip()
    suffix = _SUFFIX.search(query)
    if suffix is None:
        return Selector(name, written, query, many=many)
    own_text, attribute = suffix.group(1) is not None, (suffix.group(2) or "").lower()
    query = query[: suffix.start()]
    return Selector(name, written, query, many=many, own_text=own_text, attribute=attribute)


def compile_selectors(select: dict[str, str]) -> list[Selector]:
    """Parse every selector and try it on a small page; InvalidSelector names a bad one."""
    probe = Page(_PROBE)
    selectors = [parse_selector(name, written) for name, written in select.items()]
    for selector in selectors:
        probe.value(selector)
    return selectors


def extract(html: str, selectors: list[Selector]) -> dict[str, Value]:
    """Return the value of each selector by its name."""
    page = Page(html)
    return {selector.name: page.value(selector) for selector in selectors}
