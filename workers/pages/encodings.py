"""Find the encoding of a page and decode it, as browsers do.

    sniff_encoding(body, content_type) -> Python's name of the encoding, such as "cp1251"
    decode(body, encoding)             -> the text

Labels are those of the WHATWG encoding standard (webencodings). The encoding is, in this order:
that of a byte order mark, of Content-Type, of an <?xml> declaration, of a <meta>, else UTF-8. A
<meta> is looked for as the HTML standard says ("prescan a byte stream") in the first PRESCAN_BYTES,
and behind them, as Chromium does, as long as the head of the page lasts.
"""

import re

import webencodings

PRESCAN_BYTES = 1024
HEAD_BYTES_MAX = 256 * 1024  # no page has a longer head; the search has to end somewhere

_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_CHARSET = re.compile(r";\s*charset\s*=\s*(?:\"([^\"]*)|'([^']*)|([^\s;,]+))", re.IGNORECASE)
_XML = re.compile(rb"<\?xml[^>]*?encoding[\0- ]*=[\0- ]*(?:\"([^\">]+)\"|'([^'>]+)')")
_XML_UTF16 = ((b"<\0?\0x\0", "utf-16-le"), (b"\0<\0?\0x", "utf-16-be"))

_SPACE = rb"[\t\n\f\r ]"
_ATTRIBUTE = re.compile(
    rb"[\t\n\f\r /]*([^\t\n\f\r />][^\t\n\f\r />=]*)" + _SPACE + rb"*"
    rb"(?:=" + _SPACE + rb"*(?:\"([^\"]*)\"|'([^']*)'|(?![\"'])([^\t\n\f\r >]*)))?"
)
_TAG = re.compile(rb"</?([A-Za-z][^\t\n\f\r />]*)")
_CONTENT = re.compile(
    rb"charset[\t\n\f\r ]*=[\t\n\f\r ]*(?:\"([^\"]*)\"|'([^']*)'|(?![\"'])([^\t\n\f\r ;]+))",
    re.IGNORECASE,
)
# Elements of a head; the content of the second kind is no markup.
_IN_HEAD = frozenset(
    {
        b"html",
        b"head",
        b"meta",
        b"link",
        b"base",
        b"object",
        b"noscript",
        b"title",
        b"style",
        b"script",
    }
)
_RAW = frozenset({b"title", b"style", b"script"})

# Python's GBK is smaller than the standard's, which every decoder takes for GB18030.
_PYTHON = {"gbk": "gb18030"}


def sniff_encoding(body: bytes, content_type: str) -> str:
    """Return Python's name of the encoding; UTF-8 where nothing is declared."""
    for bom, codec in _BOMS:
        if body.startswith(bom):
            return codec
    declared = _CHARSET.search(content_type)
    if declared and (named := _lookup(next(filter(None, declared.groups()), ""))):
        return named
    kind = content_type.partition(";")[0].strip().lower()
    if not kind or "html" in kind or "xml" in kind:
        return _declared(body) or "utf-8"
    return "utf-8"


def decode(body: bytes, encoding: str) -> str:
    """Return the text without its BOM; bytes that do not fit the encoding become U+FFFD."""
    if encoding in ("replacement", "x-user-defined"):  # codecs of the standard alone
        own = webencodings.lookup(encoding)
        assert own is not None
        return str(own.codec_info.decode(body, "replace")[0])
    return body.decode(encoding, "replace").removeprefix("\ufeff")


def _lookup(label: str) -> str | None:
    """Return Python's name of an encoding label of the standard."""
    found = webencodings.lookup(label)
    if found is None:
        return None
    return _PYTHON.get(found.name) or str(found.codec_info.name)


def _lookup_bytes(label: bytes) -> str | None:
    """Return the same for a label in a page that was read as ASCII, so it is no UTF-16."""
    found = _lookup(label.decode("latin-1"))
    if found is None:
        return None
    if found.startswith("utf-16"):
        return "utf-8"
    return "cp1252" if found == "x-user-defined" else found


def _declared(body: bytes) -> str | None:
    """Return the encoding that the page itself declares."""
    for start, codec in _XML_UTF16:
        if body.startswith(start):
            return codec
    xml = _XML.match(body, 0, PRESCAN_BYTES)
    if xml and (found := _lookup_bytes(xml.group(1) or xml.group(2))):
        return found
    return _prescan(body[:PRESCAN_BYTES]) or _search_head(body)


def _prescan(data: bytes) -> str | None:
    """Search as the HTML standard says, which does not know scripts."""
    at = 0
    while (at := data.find(b"<", at)) >= 0:
        if data.startswith(b"<!--", at):
            end = data.find(b"-->", at + 2)
            if end < 0:
                return None
            at = end + 3
        elif tag := _TAG.match(data, at):
            attributes, at = _attributes(data, tag.end())
            if at < 0:
                return None
            if data[tag.start() + 1] != ord("/") and tag.group(1).lower() == b"meta":
                found = _meta(attributes)
                if found:
                    return found
        elif data[at + 1 : at + 2] in (b"!", b"/", b"?"):
            at = data.find(b">", at)
            if at < 0:
                return None
        else:
            at += 1
    return None


def _search_head(body: bytes) -> str | None:
    """Search as Chromium does: until an element that no head has, at least PRESCAN_BYTES."""
    in_head, at = True, 0
    data = body[:HEAD_BYTES_MAX]
    while in_head or at < PRESCAN_BYTES:
        at = data.find(b"<", at)
        if at < 0:
            return None
        if data.startswith(b"<!--", at):
            at = data.find(b"-->", at + 2) + 3
            if at < 3:
                return None
            continue
        tag = _TAG.match(data, at)
        if tag is None:
            at += 1
            continue
        name, closes = tag.group(1).lower(), data[at + 1] == ord("/")
        attributes, at = _attributes(data, tag.end())
        if at < 0:
            return None
        in_head = in_head and name in _IN_HEAD and not (closes and name == b"head")
        if name == b"meta" and not closes and (found := _meta(attributes)):
            return found
        if name in _RAW and not closes:
            end = re.compile(rb"</" + name, re.IGNORECASE).search(data, at)
            if end is None:
                return None
            at = end.start()
    return None


def _attributes(data: bytes, at: int) -> tuple[dict[bytes, bytes], int]:
    """Return the attributes of a tag, the first of each name, and its end; -1 without one."""
    found: dict[bytes, bytes] = {}
    while attribute := _ATTRIBUTE.match(data, at):
        at = attribute.end()
        if data[at : at + 1] == b"=":  # a value whose quote is never closed
            return found, -1
        name, *values = attribute.groups()
        found.setdefault(name.lower(), next((each for each in values if each is not None), b""))
    end = data.find(b">", at)
    return found, end + 1 if end >= 0 else -1


def _meta(attributes: dict[bytes, bytes]) -> str | None:
    if b"charset" in attributes:
        return _lookup_bytes(attributes[b"charset"])
    if attributes.get(b"http-equiv", b"").lower() != b"content-type":
        return None
    written = _CONTENT.search(attributes.get(b"content", b""))
    return _lookup_bytes(next(filter(None, written.groups()), b"")) if written else None
