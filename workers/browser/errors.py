"""Errors of a browser, by the part that failed.

    PageCrashed    the page's renderer ended: out of memory, killed, a bug; the browser lives
    PageClosed     the page closed itself or was closed
    BrowserDied    the browser's main process ended
    DriverDied     Playwright's own process (node) ended
    BrowserStuck   the browser lives and does not answer

Each may pass with another attempt, in another page or browser.
"""

from musterd.ipc.errors import MusterdError


class BrowserError(MusterdError):
    """The browser could not do what was asked."""


class PageCrashed(BrowserError):
    """The page's renderer process ended."""

    def __init__(self, message: str = "the page's renderer process ended") -> None:
        super().__init__(message)


class PageClosed(BrowserError):
    """The page is closed."""


class BrowserDied(BrowserError):
    """The browser's main process ended."""


class DriverDied(BrowserError):
    """The process between us and the browser ended."""


class BrowserStuck(BrowserError):
    """The browser does not answer."""


class ScriptFailed(BrowserError):
    """A script threw an error in the page, or the page navigated away meanwhile."""

    def __init__(self, message: str, *, navigated: bool = False) -> None:
        super().__init__(message)
        self.navigated = navigated


# After these another browser is needed to go on.
LOST = (BrowserDied, DriverDied, BrowserStuck)
