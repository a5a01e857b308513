"""Jobs of urlwatch: its `urls.yaml`, a YAML document for each job.

Filters that pick out a part of the page become `select`, which also makes text of it. Filters that
change the text further are noted. A job whose page is no HTML, or whose filters cannot be known
here, is refused.
"""

import re
from collections.abc import Iterator
from typing import Any

from musterd.supervisor.config.sources import Unusable, read_documents, shown
from musterd.supervisor.ctl.import_entries import (
    BROWSER,
    CHANGED,
    ENTRIES_MAX,
    FIELD,
    PARSER,
    TOO_MANY,
    WHOLE_PAGE,
    Entry,
    check_size,
    note_rest,
)

_OWN = (
    *("kind", "name", "url", "navigate", "command", "filter", "enabled", "headers", "timeout"),
    *("method", "data", "max_tries", "ignore_cached", "wait_until", "wait_for"),
)
_SETTINGS = ("display", "report", "job_defaults")  # sections of its other file, urlwatch.yaml
_ERRORS = "errors are no changes here, and are retried: see [[alerts]] for what is told"
_ADVICE = {
    "cookies": "log in with a session (docs/sessions.md)",
    "http_proxy": "give the site's [targets] a proxy",
    "https_proxy": "give the site's [targets] a proxy",
    "ssl_no_verify": "certificates are always checked",
    "diff_filter": "select less of the page",
    "diff_tool": "musterd compares by itself",
    "ignore_connection_errors": _ERRORS,
    "ignore_http_error_codes": _ERRORS,
    "ignore_timeout_errors": _ERRORS,
    "ignore_too_many_redirects": _ERRORS,
}
# `select` does what these do.
_NEEDLESS = ("html2text", "strip", "striplines", "beautify", "sha1sum")
_TEXT = ("grep", "grepi", "re.sub", "re.findall", "sort", "reverse", "remove-duplicate-lines")
_ELEMENTS = {
    "element-by-id": '[id="{}"]',
    "element-by-class": '[class~="{}"]',
    "element-by-style": '[style="{}"]',
    "element-by-tag": "{}",
}
_TAG = re.compile(r"[A-Za-z][\w-]*")
_WAITS = {"networkidle0": "networkidle", "networkidle2": "networkidle"}
_WAITS |= {each: each for each in ("load", "domcontentloaded")}


def read_urlwatch(text: str) -> list[Entry]:
    """Return the jobs of the file; Unusable if it has none."""
    entries: list[Entry] = []
    for number, job in enumerate(_documents(text), 1):
        if job is None:
            continue
        if len(entries) == ENTRIES_MAX:
            raise Unusable(TOO_MANY)
        place = f"job {number}"
        check_size(job, place)
        if not isinstance(job, dict) or not all(isinstance(key, str) for key in job):
            raise Unusable(f"{place} is {shown(job)}, not a job: give urlwatch's urls.yaml")
        if any(key in job for key in _SETTINGS):
            raise Unusable("has urlwatch's settings: give its list of jobs, urls.yaml")
        entries.append(_entry(place, job))
    return entries


def _documents(text: str) -> list[Any]:
    try:
        return read_documents(text)
    except RecursionError:
        raise Unusable("nested too deeply: flatten it") from None
    except Unusable:
        raise
    except ValueError as error:  # month 13
        raise Unusable(f"holds a value that cannot be read: {error}") from None


def _entry(place: str, job: dict[str, Any]) -> Entry:
    browser = "navigate" in job
    url = job.get("navigate" if browser else "url") or ""
    entry = Entry(place, str(job.get("name") or ""), str(url))
    if "command" in job:
        entry.refuse("command", job["command"], "is a shell command: write a task of your own")
    else:
        entry.check_url()
    if (method := job.get("method") or "GET") != "GET" or job.get("data"):
        entry.refuse("method", method, "sends a form: write a task of your own")
    args: dict[str, Any] = {"url": entry.url, "select": _select(entry, job.get("filter"))}
    keys: dict[str, Any] = {"task": BROWSER if browser else PARSER, "notify": CHANGED}
    entry.paused = job.get("enabled") is False
    _fill(entry, job, keys, args, browser=browser)
    entry.keys = {**keys, "args": args}
    note_rest(entry, job, _OWN, _ADVICE)
    return entry


def _fill(
    entry: Entry, job: dict[str, Any], keys: dict[str, Any], args: dict[str, Any], *, browser: bool
) -> None:
    """Take the options of a job that tasks have too."""
    tries, timeout = job.get("max_tries"), job.get("timeout")
    if isinstance(tries, int) and tries > 0:
        keys["max_retries"] = tries - 1
    elif tries is not None:
        entry.note("max_tries", tries, "the pool's max_retries holds")
    if isinstance(timeout, int | float) and timeout > 0:
        keys["timeout"] = timeout
    elif timeout is not None:
        entry.note("timeout", timeout, "the pool's timeout holds")
    args |= entry.headers(job.get("headers"))
    if job.get("ignore_cached") and not browser:  # each page of a browser is loaded anew
        args["conditional"] = False
    until, awaited = job.get("wait_until"), job.get("wait_for")
    if browser and until in _WAITS:
        args["wait_until"] = _WAITS[until]
    elif until:
        entry.note("wait_until", until, "the page's load is waited for")
    if browser and isinstance(awaited, str):
        args["wait_for"] = f"xpath:{awaited}" if awaited.startswith("/") else awaited
    elif awaited:
        entry.note("wait_for", awaited, "give wait_for a selector")


# -- filters ----------------------------------------------------------------------------------


def _filters(given: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the options of each filter, however they are written."""
    if isinstance(given, str):  # the old form: "css:.price,html2text,strip"
        given = [part.strip() for part in given.split(",")]
    if isinstance(given, dict):
        given = [given]
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, dict):
            yield from ((str(name), value) for name, value in each.items())
        elif isinstance(each, str):
            name, _, value = each.partition(":")
            yield name, value or None
        else:
            yield shown(each), None


def _select(entry: Entry, given: Any) -> dict[str, str]:
    """Return what the filters pick out of the page; note or refuse what else they do."""
    selector = ""
    for name, value in _filters(given) if given else ():
        key = f"filter {name}"
        if name in ("css", "xpath") or name in _ELEMENTS:
            if selector:
                entry.refuse(key, value, "selects in a selection: write one selector")
            selector = _selector(entry, key, name, value)
        elif name in _TEXT:
            entry.note(key, value, "select less of the page")
        elif name not in _NEEDLESS:
            entry.refuse(key, value, "makes something else of the page: write a task of your own")
    return {FIELD: selector or WHOLE_PAGE}


def _selector(entry: Entry, key: str, name: str, value: Any) -> str:
    options = value if isinstance(value, dict) else {}
    if options:
        value = options.get("path" if name == "xpath" else "selector")
    if not isinstance(value, str) or not value.strip():
        entry.refuse(key, value, "is no selector: give one")
        return ""
    if options.get("method") == "xml" or options.get("namespaces"):
        entry.refuse(key, value, "is for XML, and select for HTML: write a task of your own")
    first = options.get("maxitems") == 1 and not options.get("skip")
    known = ("path", "selector", "method", "namespaces", *(["maxitems", "skip"] if first else []))
    for option in options.keys() - set(known):
        if options[option]:
            entry.note(f"{key}.{option}", options[option], "write it into the selector")
    if name in _ELEMENTS:
        if name == "element-by-tag" and not _TAG.fullmatch(value):
            entry.refuse(key, value, "is no tag: give one")
        value = _ELEMENTS[name].format(value.replace("\\", "\\\\").replace('"', '\\"'))
    return f"{'' if first else '[]'}{'xpath:' if name == 'xpath' else ''}{value.strip()}"
