"""Watches of changedetection.io: its backup (.zip), or JSON out of it.

    url-watches.json     {"watching": {UUID: watch}, "settings": ...}, in backups until 2025
    UUID/watch.json      one watch, in newer backups beside changedetection.json with the settings
    its API              {UUID: watch}; a list of watches does too

What a watch remembers (when it was checked, what it found) is no part of a schedule. Every other
key that is not as changedetection.io makes it, and that schedules do not have, is noted.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

from musterd.supervisor.config.sources import Unusable, decoded, shown
from musterd.supervisor.ctl.import_entries import (
    BROWSER,
    CHANGED,
    ENTRIES_MAX,
    FIELD,
    IMPORT_BYTES_MAX,
    PARSER,
    TOO_MANY,
    WHOLE_PAGE,
    Entry,
    check_size,
    note_rest,
)

_SECONDS = {"weeks": 604800, "days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_MEMBER_BYTES_MAX = 1024 * 1024  # of a watch.json
_OWN = (
    *("uuid", "url", "title", "include_filters", "css_filter", "time_between_check", "paused"),
    *("time_between_check_use_default", "minutes_between_check", "fetch_backend", "headers"),
    *("method", "body", "processor", "browser_steps", "notification_muted"),
)
# What it remembers, how it shows it, and what `select` does anyway.
_STATE = (
    *("check_count", "content-type", "content_type", "consecutive_filter_failures", "date_created"),
    *("fetch_time", "history", "history_n", "last_changed", "last_checked", "last_check_status"),
    *("last_error", "last_notification_error", "last_viewed", "newest_history_key", "viewed"),
    *("notification_alert_count", "page_title", "previous_md5", "previous_md5_before_filters"),
    *("remote_server_reply", "browser_steps_last_error_step", "has_ldjson_price_data", "link"),
    *("use_page_title_in_list", "trim_text_whitespace", "favicon", "last_filter_config_hash"),
    *("restock", "last_modified", "conditions_match_logic"),
)
# Values that a watch has unless a person changed them.
_USUAL: dict[str, Any] = {
    "filter_failure_notification_send": True,
    "filter_text_added": True,
    "filter_text_removed": True,
    "filter_text_replaced": True,
    "follow_price_changes": True,
    "in_stock_only": True,
    "notification_format": "System default",
}
_LESS = "select less of the page"
_ALERTS = "write an [[alerts]] section (docs/alerts.md)"
_ADVICE = {
    "browser_profile": "give the pool of browsers its options",
    "extract_text": _LESS,
    "ignore_text": _LESS,
    "notification_body": _ALERTS,
    "notification_format": _ALERTS,
    "notification_screenshot": _ALERTS,
    "notification_title": _ALERTS,
    "notification_urls": _ALERTS,
    "proxy": "give the site's [targets] a proxy",
    "subtractive_selectors": _LESS,
    "tag": "schedules have no tags; filters of a group are not imported",
    "tags": "schedules have no tags; filters of a group are not imported",
    "time_schedule_limit": "give the schedule cron in the place of every",
    "webdriver_delay": "give browser.extract a selector to wait_for",
    "webdriver_js_execute_code": "give browser.extract a script",
}


def read_changedetection(content: bytes) -> list[Entry]:
    """Return the watches of a backup, or of JSON; Unusable if there are none."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        watches, settings = _from_backup(content)
    else:
        watches, settings = _watches(_parsed(decoded(content)))
    if len(watches) > ENTRIES_MAX:
        raise Unusable(TOO_MANY)
    entries = []
    for number, watch in enumerate(watches, 1):
        place = f"watch {number}"
        check_size(watch, place)
        if not isinstance(watch, dict):
            raise Unusable(f"{place} is {shown(watch)}, not a watch: is it the right file?")
        entries.append(_entry(place, watch, settings))
    return entries


# -- files ------------------------------------------------------------------------------------


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"at line {error.lineno}, column {error.colno}"
        raise Unusable(f"not valid JSON: {error.msg} ({where})") from None
    except (RecursionError, ValueError):
        raise Unusable("not valid JSON: nested too deeply, or a number too long") from None


def _watches(document: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the watches and the settings of a JSON document."""
    if isinstance(document, list):
        return document, {}
    if not isinstance(document, dict):
        raise Unusable(f"is {shown(document)}, not a backup of changedetection.io")
    if "url" in document:
        return [document], {}
    watching = document.get("watching")
    if isinstance(watching, dict) and (watching or "settings" not in document):
        return list(watching.values()), _table(document, "settings")
    if "settings" in document:
        raise Unusable("has settings and no watches: give the backup, a .zip")
    if document and all(isinstance(each, dict) and "url" in each for each in document.values()):
        return list(document.values()), {}
    raise Unusable("has no watches: give a backup of changedetection.io, or its url-watches.json")


def _from_backup(content: bytes) -> tuple[list[Any], dict[str, Any]]:
    watches: list[Any] = []
    settings: dict[str, Any] = {}
    for name, text in _members(content):
        document = _parsed(text)
        if name.endswith("/watch.json"):
            watches.append(document)
        elif isinstance(document, dict):
            settings = _table(document, "settings")
            watches += _table(document, "watching").values()
    if not watches:
        raise Unusable("has no watches: give a backup of changedetection.io")
    return watches, settings


def _members(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the files of a backup that have watches or settings, within the limit of all."""
    left = IMPORT_BYTES_MAX
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as backup:
            for info in sorted(backup.infolist(), key=lambda each: each.filename):
                name = info.filename
                is_watch = name.count("/") == 1 and name.endswith("/watch.json")
                if not is_watch and name not in ("url-watches.json", "changedetection.json"):
                    continue
                most = min(left, _MEMBER_BYTES_MAX) if is_watch else left
                with backup.open(info) as file:
                    read = file.read(most + 1)
                if len(read) > most:
                    raise Unusable(f"{shown(name)} in it is too large: is it the right file?")
                left -= len(read)
                yield name, decoded(read)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
        raise Unusable(f"not a readable backup: {error}") from None  # damaged, or with a password


def _table(document: dict[str, Any], *path: str) -> dict[str, Any]:
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


# -- watches ----------------------------------------------------------------------------------


def _entry(place: str, watch: dict[str, Any], settings: dict[str, Any]) -> Entry:
    entry = Entry(place, str(watch.get("title") or ""), str(watch.get("url") or ""))
    entry.check_url()
    if "{{" in entry.url or "{%" in entry.url:
        entry.refuse("url", entry.url, "is a template: write a task of your own")
    if (method := watch.get("method") or "GET") != "GET" or watch.get("body"):
        entry.refuse("method", method, "sends a form: write a task of your own")
    if (processor := watch.get("processor") or "text_json_diff") != "text_json_diff":
        entry.refuse("processor", processor, "looks for more than text: add it with a selector")
    if _steps(watch.get("browser_steps")):
        why = "are not imported: use a session with a login, or write a task of your own"
        entry.refuse("browser_steps", watch["browser_steps"], why)
    backend = watch.get("fetch_backend") or "system"
    if backend == "system":
        backend = _table(settings, "application").get("fetch_backend") or "html_requests"
    keys: dict[str, Any] = {"task": PARSER if backend == "html_requests" else BROWSER}
    if not watch.get("notification_muted"):
        keys["notify"] = CHANGED
    args: dict[str, Any] = {"url": entry.url, "select": _select(entry, watch)}
    args |= entry.headers(watch.get("headers"))
    if not watch.get("time_between_check_use_default"):
        if every := _every(watch.get("time_between_check")):
            keys["every"] = every
        elif isinstance(minutes := watch.get("minutes_between_check"), int) and minutes > 0:
            keys["every"] = f"{minutes}m"
    entry.usual_every = _every(_table(settings, "requests").get("time_between_check"))
    entry.paused = bool(watch.get("paused"))
    entry.keys = {**keys, "args": args}
    limited = {key: value for key, value in watch.items() if value != _USUAL.get(key)}
    if not _table(watch, "time_schedule_limit").get("enabled"):
        limited.pop("time_schedule_limit", None)
    note_rest(entry, limited, (*_OWN, *_STATE), _ADVICE)
    for key in (key for key in _USUAL if watch.get(key) is False):
        entry.note(key, False, "schedules have nothing like it")
    return entry


def _steps(steps: Any) -> bool:
    """Tell whether a browser has to do something: the form leaves empty steps behind."""
    idle = (None, "", "Choose one", "Goto site")
    return isinstance(steps, list) and any(
        not isinstance(each, dict) or each.get("operation") not in idle for each in steps
    )


def _every(interval: Any) -> str:
    """Return an interval of weeks, days, hours, minutes and seconds, or "" if there is none."""
    if not isinstance(interval, dict):
        return ""
    try:
        seconds = sum(int(interval.get(unit) or 0) * each for unit, each in _SECONDS.items())
    except (TypeError, ValueError, OverflowError):  # infinity
        return ""
    return f"{seconds}s" if seconds > 0 else ""


def _select(entry: Entry, watch: dict[str, Any]) -> dict[str, str]:
    filters = watch.get("include_filters") or watch.get("css_filter") or []
    if isinstance(filters, str):
        filters = [filters]
    found: list[str] = []
    for each in filters if isinstance(filters, list) else [filters]:
        text = each.strip() if isinstance(each, str) else ""
        kind, colon, rest = text.partition(":")
        if kind in ("json", "jq", "jqraw") and colon:
            entry.refuse("include_filters", each, "is for JSON: write a task of your own")
        elif kind in ("xpath", "xpath1") and colon:
            found.append(f"[]xpath:{rest.strip()}")
        elif text.startswith("/"):
            found.append(f"[]xpath:{text}")
        elif text:
            found.append(f"[]{text}")
        elif not isinstance(each, str):
            entry.refuse("include_filters", each, "is no selector")
    if len(found) < 2:
        return {FIELD: found[0] if found else WHOLE_PAGE}
    return {f"{FIELD}_{number}": each for number, each in enumerate(found, 1)}
