"""What a page is that has no value where one was: a challenge, a login form, or nothing at all.

    error = await kind_of(html, reader)       an error to raise, or None: the page is a usual one

Only asked where a watched value is missing, because shops have login forms and captchas beside
their prices, too. The lists are short on purpose: what they do not know is found missing all the
same.
"""

from collections.abc import Mapping

from musterd.ipc.errors import ChallengePage, EmptyPage, LoggedOut, MusterdError
from musterd.workers.authoring.base import Context, Permanent
from musterd.workers.pages.extraction import Selector, Value, parse_selector
from musterd.workers.pages.page_reader import PageReader

# By service: selectors of which any matches its challenge, and no other page.
CHALLENGES = {
    "Cloudflare": (
        "#challenge-form",
        "#challenge-error-text",
        "#cf-challenge-running",
        ".cf-browser-verification",
    ),
    "DDoS-Guard": (
        'script[src*="check.ddos-guard.net"]',
        'script[src*="/.well-known/ddos-guard/"]',
        "#ddg-captcha",
    ),
    "DataDome": ('iframe[src*="captcha-delivery.com"]', 'script[src*="captcha-delivery.com"]'),
    "HUMAN": ("#px-captcha",),
}
# Titles of challenges, in lower case.
TITLES = {
    "just a moment...": "Cloudflare",
    "attention required! | cloudflare": "Cloudflare",
    "ddos-guard": "DDoS-Guard",
}
# Captchas are also on pages that ask for a login; those are found first.
CAPTCHAS = {
    "reCAPTCHA": (".g-recaptcha",),
    "hCaptcha": (".h-captcha",),
    "Turnstile": (".cf-turnstile",),
    "SmartCaptcha": (".smart-captcha",),
}
LOGIN = ("input[type=password]", 'input[autocomplete="current-password"]')

_TITLE, _BODY, _SCRIPTS, _STYLES = "title", "body", "body script", "body style"


def _matches(css: str) -> Selector:
    # The text of a match, or None; an attribute would be None where it is not given.
    return parse_selector(css, css)


def _selectors() -> list[Selector]:
    groups = [*CHALLENGES.values(), *CAPTCHAS.values(), LOGIN, (_TITLE, _BODY)]
    single = [_matches(css) for group in groups for css in group]
    return [*single, *(parse_selector(css, f"[]{css}") for css in (_SCRIPTS, _STYLES))]


SELECTORS = _selectors()


def is_missing(value: Value) -> bool:
    """Tell whether a selector found nothing, or no text."""
    return not value or (isinstance(value, list) and not any(value))


async def kind_of(html: str, reader: PageReader) -> MusterdError | None:
    """Return the error that this page is, None for a usual page."""
    try:
        found = await reader.extract(html, SELECTORS)
    except Permanent:  # too large, too deep: no login form is
        return None
    title = str(found[_TITLE] or "").strip().lower()
    if name := TITLES.get(title) or _first(CHALLENGES, found):
        return ChallengePage(f"the site shows a challenge of {name} in place of the page")
    if any(found[css] is not None for css in LOGIN):
        return LoggedOut("the page has a login form, and not what was selected")
    if name := _first(CAPTCHAS, found):
        return ChallengePage(f"the page has a captcha ({name}), and not what was selected")
    if _letters(found[_BODY]) <= _letters(found[_SCRIPTS]) + _letters(found[_STYLES]):
        return EmptyPage(
            "the page has no text; if scripts write it, use browser.extract"
            if found[_SCRIPTS]
            else "the page has no text"
        )
    return None


async def check_watched(
    ctx: Context, values: dict[str, Value], html: str, reader: PageReader
) -> None:
    """Raise what the page is, where a watched value is missing on it and it is no usual page."""
    missing = any(is_missing(value) and ctx.watches(name) for name, value in values.items())
    error = await kind_of(html, reader) if missing else None
    if error is not None:
        raise error


def _first(services: Mapping[str, tuple[str, ...]], found: dict[str, Value]) -> str:
    """Return the first service of which a selector matches; "" for none."""
    for name, selectors in services.items():
        if any(found[css] is not None for css in selectors):
            return name
    return ""


def _letters(value: Value) -> int:
    """Return the number of characters that are no white space."""
    texts = [value] if isinstance(value, str) else value or []
    return sum(len("".join(text.split())) for text in texts)
