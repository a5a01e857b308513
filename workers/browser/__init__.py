"""Run pages in a browser: the built-in browser worker and its backends (docs/browser.md).

    worker.py     BrowserWorker: its tasks, the life of its browser
    backend.py    interface of a browser and its pages, and the settings of one page
    driven.py     backend "playwright"
    lean.py       backend "cdp", with lean_page.py, on cdp.py (the protocol) and chromium.py (the
                  process)
    scratch.py    the files of one browser
    filter_proxy.py  where a page may connect to
    errors.py     what failed: page, browser or driver

Importing this package starts no process and no thread: a fork server may fork after it.

May import: ipc.errors, workers.authoring, workers.metrics, workers.pages, workers.texts.
Not for: plain fetching (workers/pages).
"""

from musterd.workers.browser.backend import Page, Settings
from musterd.workers.browser.chromium import find_executable
from musterd.workers.browser.errors import (
    BrowserDied,
    BrowserError,
    BrowserStuck,
    DriverDied,
    PageClosed,
    PageCrashed,
    ScriptFailed,
)
from musterd.workers.browser.worker import BrowserOptions, BrowserWorker

__all__ = [
    "BrowserDied",
    "BrowserError",
    "BrowserOptions",
    "BrowserStuck",
    "BrowserWorker",
    "DriverDied",
    "Page",
    "PageClosed",
    "PageCrashed",
    "ScriptFailed",
    "Settings",
    "find_executable",
]
