"""One HTTP request with every limit a crawler needs, and its text decoded as a browser would.

    open_session(connector, headers) -> ClientSession        one per task: its cookies
    fetch(session, request, deadline) -> Page

What can go wrong, and whether another attempt may help:

    HttpError            429, 408, 425, 5xx            yes, after `retry_after` seconds
    PermanentHttpError   every other 4xx               no
    SiteTimeout          connect, read or deadline     yes
    SiteUnreachable      DNS, refused, reset, TLS      yes
    BadRequest           url, scheme, header, redirect no
    PageTooLarge         over the size limit           no
"""

import math
import re
import time
from email.utils import parsedate_to_datetime
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs
from msgspec import Struct

from musterd.ipc.errors import MusterdError
from musterd.workers.base import Permanent
from musterd.workers.sensitive import shown_url

CONNECT_SECONDS = 2.0  # a TCP handshake that takes longer is a site in trouble
READ_SECONDS = 5.0  # between two pieces of an answer
POOL_SECONDS = 5.0  # for a connection in all: waiting for a free one, the name, the handshake
REDIRECTS_MAX = 10
PAGE_BYTES_MAX = 10 * 1024 * 1024  # decompressed; pages over it are downloads, not pages
CHUNK_BYTES = 64 * 1024
RETRY_AFTER_SECONDS_MAX = 24 * 3600.0  # a site must not park our tasks for years
SNIFFED_BYTES = 1024  # where the HTML standard looks for a <meta charset>
SCHEMES = ("http", "https")
RETRYABLE_4XX = frozenset({408, 425, 429})

Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class HttpError(MusterdError):
    """The site answered with an error that may pass."""

    def __init__(self, status: int, url: str, retry_after: float = 0.0, reason: str = "") -> None:
        pause = f"; come back in {retry_after:g} s" if retry_after else ""
        super().__init__(f"HTTP {status} {reason}".rstrip() + f" from {url}{pause}")
        self.status = status
        self.url = url
        self.retry_after = retry_after


class PermanentHttpError(HttpError, Permanent):
    """The site answered that this request is wrong; it will say so again."""


class SiteTimeout(MusterdError, TimeoutError):
    """The site did not answer in time."""


class SiteUnreachable(MusterdError, ConnectionError):
    """No answer could be had from the site."""


class BadRequest(Permanent):
    """This request cannot be made."""


class PageTooLarge(Permanent):
    """The page is over the size limit."""


class Request(Struct, frozen=True):
    url: str
    method: Method = "GET"
    headers: dict[str, str] = {}
    body: str = ""
    bytes_max: int = PAGE_BYTES_MAX
    proxy: str | None = None


class Page(Struct, frozen=True):
    """An answer below 400. `url` is the last one of the redirects."""

    status: int
    url: str
    headers: dict[str, str]  # names in lower case; repeated ones joined by ", "
    text: str
    encoding: str
    elapsed_seconds: float


def open_session(
    connector: aiohttp.BaseConnector, headers: dict[str, str]
) -> aiohttp.ClientSession:
    """A session for one task, over connections that are kept; to be closed by the caller."""
    # "unsafe" is aiohttp's word for cookies of sites without a name, such as http://127.0.0.1/.
    jar = aiohttp.CookieJar(unsafe=True)
    return aiohttp.ClientSession(
        connector=connector, connector_owner=False, headers=headers, cookie_jar=jar
    )


def check_url(url: str) -> None:
    """BadRequest unless it is a whole http or https address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # raises where it is no number of a port
    except ValueError as error:
        raise BadRequest(f"cannot read the URL {shown_url(url)!r}: {error}") from None
    if parts.scheme not in SCHEMES:
        raise BadRequest(
            f"cannot fetch {shown_url(url)!r}: the scheme {parts.scheme!r} is not one of "
            f"{', '.join(SCHEMES)}"
        )
    if not host:
        raise BadRequest(f"cannot fetch {shown_url(url)!r}: it names no host")


async def fetch(session: aiohttp.ClientSession, request: Request, deadline: float) -> Page:
    """Makes the request, follows its redirects and reads the page, all before the deadline.

    The deadline is in seconds of time.monotonic(), math.inf for none.
    """
    check_url(request.url)
    shown = shown_url(request.url)
    # The texts of aiohttp's errors have the whole URL in them, with whatever keys are in its query;
    # so has their traceback. Therefore they are told in our words, `from None`.
    try:
        return await _request(session, request, deadline)
    except TimeoutError as error:
        raise SiteTimeout(f"no answer in time from {shown}: {told(error)}") from None
    except aiohttp.TooManyRedirects:
        raise BadRequest(f"more than {REDIRECTS_MAX} redirects from {shown}") from None
    except aiohttp.RedirectClientError as error:
        where = f"{shown} redirects to what cannot be fetched"
        raise BadRequest(f"{where}: {told(error)}") from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise BadRequest(f"cannot fetch {shown}: {told(error)}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise SiteUnreachable(f"cannot fetch {shown}: {told(error)}") from None
    except ValueError as error:  # a header, a method or a proxy that aiohttp will not send
        raise BadRequest(f"cannot send this request to {shown}: {error}") from None


async def _request(session: aiohttp.ClientSession, request: Request, deadline: float) -> Page:
    begun = time.monotonic()
    timeout = aiohttp.ClientTimeout(
        # To aiohttp, 0 or less is no limit at all.
        total=None if deadline == math.inf else max(deadline - begun, 0.001),
        connect=POOL_SECONDS,
        sock_connect=CONNECT_SECONDS,
        sock_read=READ_SECONDS,
    )
    async with session.request(
        request.method,
        request.url,
        headers=request.headers,
        data=request.body or None,
        proxy=request.proxy,
        max_redirects=REDIRECTS_MAX,
        timeout=timeout,
    ) as response:
        if response.status >= 400:
            raise http_error(response)
        body = await _read(response, request)
        encoding = sniff_encoding(body, response.headers.get(hdrs.CONTENT_TYPE, ""))
        return Page(
            status=response.status,
            url=str(response.url),
            headers=_joined(response),
            text=decode(body, encoding),
            encoding=encoding,
            elapsed_seconds=time.monotonic() - begun,
        )


async def _read(response: aiohttp.ClientResponse, request: Request) -> bytes:
    """The decompressed body, never holding more than the limit and one chunk."""
    # A body that is too long as it is sent will not be shorter when it is decompressed.
    declared = response.content_length or 0
    if request.method != "HEAD" and declared > request.bytes_max:
        raise _too_large(request, f"its Content-Length is {declared}")
    body = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        body += chunk
        if len(body) > request.bytes_max:
            raise _too_large(request, "it goes on")
    return bytes(body)


def _too_large(request: Request, how: str) -> PageTooLarge:
    return PageTooLarge(
        f"{shown_url(request.url)} is over the size limit of "
        f"{request.bytes_max} bytes ({how}); raise max_bytes if you need it"
    )


def http_error(response: aiohttp.ClientResponse) -> HttpError:
    """The error that an answer of 400 or more stands for."""
    pause = retry_after_seconds(response.headers.get(hdrs.RETRY_AFTER, ""), _site_clock(response))
    return status_error(response.status, shown_url(response.url), pause, response.reason or "")


def status_error(status: int, url: str, retry_after: float = 0.0, reason: str = "") -> HttpError:
    """The same by its status; `url` as it may be shown."""
    permanent = status < 500 and status not in RETRYABLE_4XX
    kind = PermanentHttpError if permanent else HttpError
    return kind(status, url, retry_after, reason)


def retry_after_seconds(value: str, now: float) -> float:
    """Seconds told by a Retry-After header (a number or a date); 0 where it tells none."""
    value = value.strip()
    if re.fullmatch(r"\d{1,12}", value, re.ASCII):
        seconds = float(value)
    else:
        at = _timestamp(value)
        seconds = 0.0 if at is None else at - now
    return min(max(seconds, 0.0), RETRY_AFTER_SECONDS_MAX)


def _site_clock(response: aiohttp.ClientResponse) -> float:
    """The site's own idea of now, so that its clock and ours need not agree."""
    at = _timestamp(response.headers.get(hdrs.DATE, ""))
    return time.time() if at is None else at


def _timestamp(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _joined(response: aiohttp.ClientResponse) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in response.headers.items():
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


def told(error: Exception) -> str:
    """Without the texts of aiohttp, which have the URL in them."""
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(cause, "strerror", None) or getattr(cause, "verify_message", None)
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


# -- encodings --------------------------------------------------------------------------------

# Python's codec and the labels that name it, after the WHATWG encoding standard: what pages call
# ISO-8859-1 is windows-1252, GB2312 is GB18030, and so on. A table instead of codecs.lookup(): a
# site's word must not reach codecs that are no text encodings, nor fill a cache of failures.
_LABELS = {
    "utf-8": "utf-8 utf8 unicode-1-1-utf-8",
    "utf-16-le": "utf-16 utf-16le utf16 ucs-2 unicode iso-10646-ucs-2",
    "utf-16-be": "utf-16be",
    "cp1252": "windows-1252 cp1252 iso-8859-1 iso8859-1 latin1 latin-1 l1 ascii us-ascii x-cp1252",
    "cp1250": "windows-1250 cp1250 x-cp1250",
    "cp1251": "windows-1251 cp1251 win-1251 x-cp1251",
    "cp1253": "windows-1253 cp1253",
    "cp1254": "windows-1254 cp1254 iso-8859-9 iso8859-9 latin5",
    "cp1255": "windows-1255 cp1255",
    "cp1256": "windows-1256 cp1256",
    "cp1257": "windows-1257 cp1257",
    "cp1258": "windows-1258 cp1258",
    "cp874": "windows-874 tis-620 iso-8859-11",
    "cp866": "ibm866 cp866 866",
    "koi8-r": "koi8-r koi8 koi",
    "koi8-u": "koi8-u koi8-ru",
    "mac-roman": "macintosh mac x-mac-roman",
    "mac-cyrillic": "x-mac-cyrillic",
    "iso8859-2": "iso-8859-2 iso8859-2 latin2",
    "iso8859-3": "iso-8859-3 iso8859-3 latin3",
    "iso8859-4": "iso-8859-4 iso8859-4 latin4",
    "iso8859-5": "iso-8859-5 iso8859-5 cyrillic",
    "iso8859-6": "iso-8859-6 iso8859-6 arabic",
    "iso8859-7": "iso-8859-7 iso8859-7 greek",
    "iso8859-8": "iso-8859-8 iso8859-8 iso-8859-8-i hebrew",
    "iso8859-10": "iso-8859-10 latin6",
    "iso8859-13": "iso-8859-13",
    "iso8859-14": "iso-8859-14",
    "iso8859-15": "iso-8859-15 iso8859-15 latin9",
    "iso8859-16": "iso-8859-16",
    "gb18030": "gb18030 gbk gb2312 x-gbk chinese",
    "big5hkscs": "big5 big5-hkscs x-x-big5",
    "euc-jp": "euc-jp x-euc-jp",
    "iso2022-jp": "iso-2022-jp",
    "cp932": "shift-jis shift_jis sjis x-sjis windows-31j ms932",
    "cp949": "euc-kr korean ks-c-5601-1987 ks_c_5601-1987 windows-949",
}
_CODECS = {label: codec for codec, labels in _LABELS.items() for label in labels.split()}
_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([^\s\"'/>;,]+)", re.IGNORECASE)
_META = re.compile(rb"<meta\s[^>]*charset\s*=\s*[\"']?\s*([^\s\"'/>;]+)", re.IGNORECASE)
_XML = re.compile(rb"^\s*<\?xml\s[^>]*encoding\s*=\s*[\"']([^\"']+)")


def sniff_encoding(body: bytes, content_type: str) -> str:
    """Python's name of the encoding: by BOM, Content-Type, <meta> or <?xml>, else UTF-8."""
    for bom, codec in _BOMS:
        if body.startswith(bom):
            return codec
    declared = _CHARSET.search(content_type)
    if declared and (named := _CODECS.get(declared.group(1).lower())):
        return named
    kind = content_type.partition(";")[0].lower()
    if not kind or "html" in kind or "xml" in kind:
        start = body[:SNIFFED_BYTES]
        written = _META.search(start) or _XML.search(start)
        label = written.group(1).decode("latin-1").lower() if written else ""
        codec = _CODECS.get(label, "utf-8")
        # Whoever could read the <meta> as ASCII does not read UTF-16.
        return "utf-8" if codec.startswith("utf-16") else codec
    return "utf-8"


def decode(body: bytes, encoding: str) -> str:
    """The text without its BOM; what does not fit the encoding becomes U+FFFD."""
    return body.decode(encoding, "replace").removeprefix("\ufeff")
