r"""Find the value of a secret in a text, however the value was encoded.

A value is rarely written as it is: `repr` and JSON put backslashes before its quotes, once for each
time they are applied; URLs have %2F or %2f for its slash; a traceback of an exception group has
`  | ` before each of its lines; a header has it in base64 with a name before it. So each character
that any of these escapes is looked for in all forms at once:

    "    "  \"  \\\"  %22  %2522  %5C%22  \x22  \u0022  &quot;  &#34;
    ö    its UTF-8  \xc3\xb6  \xf6  \u00f6  %C3%B6  &#246;

No encoding changes letters, digits, `_`, `.` and `-`. The longest run of these is the anchor of a
value: a text without the anchor is not searched further, which is as quick as a search gets. Base64
has anchors for each of the three ways to begin a group of bytes.

A value of several lines is looked for line by line, so that a single line of it is found as well.
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

# Shorter values occur in any text by chance: replacing them would tell more than it hides.
TEXT_CHARS_MIN = 4
# A part of a value of several lines is looked for by itself from this length on.
LINE_CHARS_MIN = 16
# Parts of one value. A key of 8192 bits has 100 lines; of longer values several make one part.
PARTS_MAX = 128
PART_CHARS_MAX = 1024  # of one line of a value: its pattern is compiled when its anchor is found
# Escapes of escapes: backslashes double each time, so this is six times.
BACKSLASHES_MAX = 64
PERCENTS_MAX = 8
INDENT_MAX = 64  # longest margin before a line
# Characters of a value that have many forms: each takes half a millisecond to compile. Parts beyond
# this number are found only as they are.
SPECIALS_MAX = 4000
BASE64_CHARS_MIN = 8  # that depend on the value alone: fewer occur in any picture
BASE64_CHARS_MAX = 96  # that are compared; the rest of the run belongs to the value
BASE64_WINDOW = 64  # lines of base64 are no shorter, so at most one of two anchors within is cut
BASE64_ANCHOR_CHARS = 8
ANCHOR_CHARS_MIN = 3
ANCHOR_CHARS_MAX = 32

_RUN = re.compile(
    r"(?P<backslashes>\\+)|(?P<gap>[ \t]*[\r\n][ \t\r\n]*)|(?P<blanks>[ ]+)|[A-Za-z0-9_.-]+|.",
    re.DOTALL,
)
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_ARMOUR = re.compile(r"-----(?:BEGIN|END) [A-Z0-9 ]+-----")  # of a PEM file: equal in all of them
_BLANK = re.compile(r"\s")
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
# line breaks to Python, which puts margins after them
_OTHER_BREAKS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LETTERS = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", "\v": "v", "\a": "a"}
_ENTITIES = {'"': "quot", "'": "apos", "<": "lt", ">": "gt"}

_PERCENT = rf"%(?:25){{0,{PERCENTS_MAX}}}"
_BACKSLASH = rf"(?:\\|{_PERCENT}5[cC])"
_ESCAPE = rf"{_BACKSLASH}{{1,{BACKSLASHES_MAX}}}"
_INDENT = rf"[ \t|>]{{0,{INDENT_MAX}}}"
_WRITTEN_BREAK = rf"{_ESCAPE}(?:[rn]|x0[aAdD]|u000[aAdD])|{_PERCENT}0[aAdD]"
# The end of a line: in a text, in repr or JSON, in a URL. The whole margin belongs to it (the
# second `+`): with two ways to divide blanks, a value of n lines would be tried in 2**n ways.
_BREAK = rf"(?:[\r\n]{{1,2}}+{_INDENT}+|{_WRITTEN_BREAK})"
_BREAK_BEFORE_MARGIN = (
    rf"(?:[\r\n]{{1,2}}+{_INDENT}|{_WRITTEN_BREAK})"  # the line begins with | or >
)
_BLANK_WAYS = (
    rf"(?:(?:{_ESCAPE})?[ \t+]|{_PERCENT}(?:20|09|2[bB])|{_ESCAPE}(?:t|x20|x09|u0020|u0009)"
    r"|&(?:amp;){0,4}#(?:0{0,4}(?:32|9)|[xX]0{0,4}(?:20|9));)"
)
_JOINED = rf"{_BREAK}{{0,2}}"
_BREAKS = (b"\n", b"\r", b"\\", b"%")  # any text with such a line end has one of them
_BASE64 = rf"(?:[A-Za-z0-9+/_=-]|{_PERCENT}(?:2[bBfF]|3[dD])|{_BREAK})*+"


class _Form:
    """One way to write a part of a value: a pattern, compiled and tried only where it can occur."""

    __slots__ = ("_anchors", "_make", "_make_joined", "_pattern", "_pattern_joined")

    def __init__(
        self,
        make: Callable[[], str],
        anchors: tuple[bytes, ...],
        make_joined: Callable[[], str] | None = None,
    ) -> None:
        self._make = make
        self._make_joined = make_joined  # for a form that may span several lines, which is slower
        self._anchors = anchors  # one of them must occur; empty: the form has no searchable run
        self._pattern: re.Pattern[bytes] | None = None
        self._pattern_joined: re.Pattern[bytes] | None = None

    def patterns(self, data: bytes) -> Iterator[re.Pattern[bytes]]:
        """Return the patterns that are worth a try."""
        if self._anchors and not any(anchor in data for anchor in self._anchors):
            return
        if self._pattern is None:
            self._pattern = re.compile(self._make().encode())
        yield self._pattern
        if self._make_joined is None or not any(each in data for each in _BREAKS):
            return
        if self._pattern_joined is None:
            self._pattern_joined = re.compile(self._make_joined().encode())
        yield self._pattern_joined


class Written:
    """The value of a secret in all forms that are looked for."""

    def __init__(self, value: str) -> None:
        self._forms = list(_forms(value)) if len(value) >= TEXT_CHARS_MIN else []

    def is_in(self, data: bytes) -> bool:
        return any(
            pattern.search(data) is not None
            for form in self._forms
            for pattern in form.patterns(data)
        )

    def replace(self, data: bytes, instead: bytes) -> bytes:
        """Return the data with `instead` in place of the secret."""
        for form in self._forms:
            for pattern in form.patterns(data):
                data = pattern.sub(lambda _: instead, data)
        return data


def scrub(text: str, secrets: Iterable[tuple[Written, bytes]]) -> str:
    """Return the text with each secret replaced."""
    before = data = text.encode("utf-8", "surrogatepass")
    for written, instead in secrets:
        data = written.replace(data, instead)
    return text if data == before else data.decode("utf-8", "surrogatepass")


def _forms(value: str) -> Iterator[_Form]:
    specials = 0
    for part in _parts(value):
        specials += len(_PLAIN.sub("", part))
        make = partial(_pattern if specials <= SPECIALS_MAX else _as_it_is, part)
        yield _Form(make, _anchors(part))
    yield from _base64_forms(value.encode("utf-8", "surrogatepass"))


# -- as text ------------------------------------------------------------------------------------


def _parts(value: str) -> list[str]:
    """Return the parts to look for: the whole value, or its distinctive lines.

    A line without blanks is taken for part of a key. Other lines stay together: a line such as
    `"type": "account",` is in many texts.
    """
    found: list[str] = []
    others: list[str] = []

    def together() -> None:
        joined = "\n".join(others).strip()
        others.clear()
        if not joined:
            return
        if len(joined) >= LINE_CHARS_MIN:
            found.append(joined)
        elif found:  # the short end of a key
            found.append(f"{found[-1]}\n{joined}")

    for line in _LINE_BREAK.split(value):
        dense = line.strip()
        if _ARMOUR.fullmatch(dense):
            together()
        elif len(dense) >= LINE_CHARS_MIN and not _BLANK.search(dense):
            together()
            found.append(dense)
        else:
            others.append(line)
    together()
    several = -(-len(found) // PARTS_MAX)
    if several > 1:
        found = ["\n".join(found[at : at + several]) for at in range(0, len(found), several)]
    pieces = [piece for part in found or [value] for piece in _pieces(part)]
    return sorted(pieces, key=len, reverse=True)  # the whole before a part of it


def _pieces(part: str) -> Iterator[str]:
    while len(part) > PART_CHARS_MAX:
        plain = _PLAIN.search(part, PART_CHARS_MAX)  # not inside of an escape
        end = plain.start() if plain else len(part)
        yield part[:end]
        part = part[end:]
    if part.strip():
        yield part


def _anchors(part: str) -> tuple[bytes, ...]:
    runs: list[str] = _PLAIN.findall(part)
    longest = max(runs, key=len, default="")[:ANCHOR_CHARS_MAX]
    return (longest.encode(),) if len(longest) >= ANCHOR_CHARS_MIN else ()


def _pattern(part: str) -> str:
    pieces = []
    # further backslashes before the first character are left alone: a text may have many
    escapes = ("", _BACKSLASH)
    for found in _RUN.finditer(part):
        run, then = found[0], part[found.end() : found.end() + 1]
        match found.lastgroup:
            case "backslashes":
                pieces.append(rf"{_BACKSLASH}{{{len(run)},{len(run) * BACKSLASHES_MAX}}}")
            case "gap":
                ending = _BREAK_BEFORE_MARGIN if then and then in "|>" else _BREAK
                pieces.append(rf"(?:{ending}|{_BLANK_WAYS}){{0,{len(run) + 2}}}")
            case "blanks":
                pieces.append(
                    _blanks(len(run), then) if pieces else rf"(?:[ +]|{_PERCENT}20){{{len(run)}}}"
                )
            case _:
                pieces.append(re.escape(run) if _PLAIN.fullmatch(run) else _special(run, *escapes))
        # The pattern of the backslashes has taken those before the next character already.
        after_backslashes = found.lastgroup == "backslashes"
        escapes = ("", "") if after_backslashes else (f"(?:{_ESCAPE})?", _ESCAPE)
    return "".join(pieces)


def _blanks(count: int, then: str) -> str:
    """Return a pattern for this many blanks, or fewer and the end of a line."""
    ending = _BREAK_BEFORE_MARGIN if then and then in "|>" else _BREAK
    return rf"(?:{_BLANK_WAYS}{{{count}}}|{_BLANK_WAYS}{{0,{count}}}{ending})"


def _as_it_is(part: str) -> str:
    return _verbatim(part.encode("utf-8", "surrogatepass"))


def _special(char: str, before_itself: str, before_escape: str) -> str:
    """Return a pattern for all forms of this character, and the backslashes before it."""
    code, data = ord(char), char.encode("utf-8", "surrogatepass")
    if char == "%":  # plain and encoded in one pattern: two ways for each of n would be 2**n
        ways = [rf"%(?:25){{0,{PERCENTS_MAX + 1}}}"]
    else:
        ways = [_verbatim(data), "".join(f"{_PERCENT}{_hex(byte, 2)}" for byte in data)]
    if char in _OTHER_BREAKS:
        ways[0] += _INDENT
    ways.append(rf"&(?:amp;){{0,4}}(?:#0{{0,4}}{code}|#[xX]0{{0,4}}{_hex(code, 1)}{_named(char)});")
    if char == "&":
        ways.append("&(?:amp;){1,5}")
    if code < 0x80:
        told = [f"(?:x|u00|U000000){_hex(code, 2)}"]
    else:
        told = [
            _ESCAPE.join(f"u{_hex(unit, 4)}" for unit in _units(char)),
            _ESCAPE.join(f"x{_hex(byte, 2)}" for byte in data),
            f"U{_hex(code, 8)}",
        ]
        if code < 0x100:
            told.append(f"x{_hex(code, 2)}")
    if char in _LETTERS:
        told.append(_LETTERS[char])
    return f"(?:{before_itself}(?:{'|'.join(ways)})|{before_escape}(?:{'|'.join(told)}))"


def _named(char: str) -> str:
    return f"|{_ENTITIES[char]}" if char in _ENTITIES else ""


def _units(char: str) -> list[int]:
    """Return the UTF-16 units of the character, as JSON counts."""
    data = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


def _hex(number: int, digits: int) -> str:
    """Return a pattern for the number in hexadecimal, in either case."""
    return "".join(
        f"[{digit}{digit.upper()}]" if digit.isalpha() else digit
        for digit in f"{number:0{digits}x}"
    )


def _verbatim(data: bytes) -> str:
    return "".join(rf"\x{byte:02x}" for byte in data)


# -- as base64 ----------------------------------------------------------------------------------


def _base64_forms(value: bytes) -> Iterator[_Form]:
    for before in range(3):
        chars = base64.b64encode(bytes(before) + value).decode()
        # The characters that depend on the value alone, whatever stands before and after it.
        own = chars[-(-before * 8 // 6) : (before + len(value)) * 8 // 6]
        if len(own) < BASE64_CHARS_MIN:
            if before == 0:  # the value by itself
                yield _Form(partial(re.escape, chars), (chars.encode(),))
            continue
        anchors = _base64_anchors(own[:BASE64_WINDOW])
        joined = partial(_base64_pattern, own, _JOINED)
        yield _Form(partial(_base64_pattern, own, ""), anchors, joined)


def _base64_pattern(own: str, between: str) -> str:
    pattern = between.join(_base64_char(char) for char in own[:BASE64_CHARS_MAX])
    if len(own) > BASE64_CHARS_MAX:
        return pattern + _BASE64
    return rf"{pattern}(?:[A-Za-z0-9+/_-]?(?:=|{_PERCENT}3[dD]){{1,2}})?"


def _base64_char(char: str) -> str:
    if char == "+":
        return rf"(?:[+-]|{_PERCENT}2[bB])"
    if char == "/":
        return rf"(?:{_BACKSLASH}{{0,{BACKSLASHES_MAX}}}(?:/|{_PERCENT}2[fF])|_)"
    return char


def _base64_anchors(chars: str) -> tuple[bytes, ...]:
    """Return two anchors that do not overlap, because a line may end within one of them."""
    pieces = []
    for run in re.findall("[A-Za-z0-9]+", chars):
        half = max(len(run) // 2, 1)
        pieces += [run] if len(run) < BASE64_ANCHOR_CHARS else [run[:half], run[half:]]
    pieces.sort(key=len, reverse=True)
    if len(pieces) < 2 or len(pieces[1]) < ANCHOR_CHARS_MIN:
        return ()
    return tuple(piece[:BASE64_ANCHOR_CHARS].encode() for piece in pieces[:2])
