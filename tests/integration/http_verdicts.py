"""Compare how curl, Chromium and musterd treat answers that break HTTP, for docs/fetching.md.

.venv/bin/python tests/integration/http_verdicts.py     measures, and rewrites the table
"""

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from http_violations import BODY, GROUPS, TEXT, VIOLATIONS, Violation, ViolationServer

from musterd.workers.authoring.base import Context, Permanent
from musterd.workers.pages.http import HttpError
from musterd.workers.parser import ParserWorker

DOCS = Path(__file__).parents[2] / "docs" / "fetching.md"
TABLE = re.compile(r"(?<=<!-- violations -->\n).*?(?=<!-- /violations -->)", re.DOTALL)
CHROMIUM = "/usr/lib/chromium/chromium"
PATIENCE_SECONDS = 3  # for an answer without a recognizable end

# "page": the intended BODY; "other": another body and no error; "empty": no body, as is correct
PAGE, OTHER, EMPTY, REFUSED, RETRIED, ERROR = (
    "page",
    "other",
    "empty",
    "refused",
    "retried",
    "error",
)


def read_table() -> dict[str, tuple[str, str, str]]:
    """Return the verdicts of curl, Chromium and musterd by the name of the violation."""
    table = TABLE.search(DOCS.read_text())
    assert table is not None
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.group().splitlines()
        if line.startswith("| ") and not line.startswith("| curl |")
    ]
    return {
        name: (curl, chromium, ours.rstrip("*"))
        for curl, chromium, ours, names in rows
        for name in names.split("; ")
    }


def write_table(verdicts: dict[str, tuple[str, str, str]]) -> None:
    lines = []
    for title, group in GROUPS.items():
        rows: dict[str, list[str]] = {}  # names of violations by their verdicts
        for violation in group:
            curl, chromium, ours = verdicts[violation.name]
            agreed = (PAGE,) if curl == chromium == PAGE else (REFUSED, RETRIED)
            mark = "" if ours in agreed else "*"
            rows.setdefault(f"{curl} | {chromium} | {ours}{mark}", []).append(violation.name)
        lines += [
            f"\n### {title}\n",
            "| curl | Chromium | musterd | the answer |",
            "|---|---|---|---|",
            *(f"| {row} | {'; '.join(names)} |" for row, names in rows.items()),
        ]
    text = DOCS.read_text()
    DOCS.write_text(TABLE.sub(lambda _: "\n".join(lines) + "\n\n", text))


def curl_verdict(url: str) -> str:
    """Return the verdict of this machine's curl on an answer."""
    command = ["curl", "-sS", "--compressed", "-L", "--max-time", str(PATIENCE_SECONDS), url]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        return REFUSED
    return PAGE if done.stdout == BODY else EMPTY if not done.stdout else OTHER


def curl_version() -> str:
    """Return the version of curl, such as 7.88.1, or nothing without curl."""
    if shutil.which("curl") is None:
        return ""
    told = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.split()[1]


async def our_verdicts(
    server: ViolationServer, violations: Iterable[Violation]
) -> dict[str, tuple[str, str]]:
    """Return the verdict of musterd on each violation, and its reason."""
    worker = ParserWorker()
    worker.pool, worker.index, worker.options = "parser", 0, {}
    await worker.open()
    try:
        return {each.name: await _our_verdict(worker, server.url(each)) for each in violations}
    finally:
        await worker.close()


async def _our_verdict(worker: ParserWorker, url: str) -> tuple[str, str]:
    context = Context("task", deadline=time.monotonic() + PATIENCE_SECONDS)
    try:
        page = await worker.fetch(context, url)
    except HttpError as error:
        return ERROR, str(error)
    except Permanent as error:
        return REFUSED, str(error)
    except (ConnectionError, TimeoutError) as error:
        return RETRIED, str(error)
    msgspec.msgpack.encode(page)  # as a result is encoded
    text = page["text"]
    return (PAGE if text.encode() == BODY else EMPTY if not text else OTHER), ""


async def chromium_verdicts(
    server: ViolationServer, violations: Iterable[Violation]
) -> dict[str, str]:
    """Return the verdict of Chromium on each violation."""
    from playwright.async_api import Browser, Error, async_playwright

    async def verdict(browser: Browser, url: str) -> str:
        context = await browser.new_context()
        page = await context.new_page()
        protocol = await context.new_cdp_session(page)
        await protocol.send("Network.enable")
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        main: list[str] = []

        def told(good: bool, event: dict[str, str]) -> None:
            if main and event["requestId"] == main[0] and not ended.done():
                ended.set_result(good)

        protocol.on("Network.requestWillBeSent", lambda event: main.append(event["requestId"]))
        protocol.on("Network.loadingFinished", lambda event: told(True, event))
        protocol.on("Network.loadingFailed", lambda event: told(False, event))
        try:
            await page.goto(url, timeout=PATIENCE_SECONDS * 1000, wait_until="commit")
            if not await asyncio.wait_for(ended, PATIENCE_SECONDS):
                return REFUSED
            text = await page.evaluate("document.body ? document.body.innerText.trim() : ''")
            return PAGE if text == TEXT else EMPTY if not text else OTHER
        except (Error, TimeoutError):
            return REFUSED
        finally:
            await context.close()

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            return {each.name: await verdict(browser, server.url(each)) for each in violations}
        finally:
            await browser.close()


def main() -> None:
    server = ViolationServer()
    chromium = asyncio.run(chromium_verdicts(server, VIOLATIONS))
    ours = asyncio.run(our_verdicts(server, VIOLATIONS))
    curl = {each.name: curl_verdict(server.url(each)) for each in VIOLATIONS}
    server.close()
    write_table({name: (curl[name], chromium[name], ours[name][0]) for name in curl})


if __name__ == "__main__":
    main()
