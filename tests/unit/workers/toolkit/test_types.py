"""The toolkit keeps signatures, as a strict type checker sees them."""

import re
import subprocess
import sys
from pathlib import Path

USERS_CODE = """
from typing import assert_type
from urllib.parse import urlsplit

from musterd.workers.toolkit import (
    NetworkClient, Timeouts, breaker, bulkhead, executors, locks, retry, timeout
)


@retry(max_retries=5, on=(OSError, TimeoutError), strategy="linear", on_retry=print)
@breaker(key=lambda url: urlsplit(url).netloc)
@bulkhead("critical", 20)
@timeout(5)
def fetch(url: str, n: int = 1) -> bytes:
    return url.encode() * n


@timeout(5)
@bulkhead("critical", 20, timeout=1)
@breaker("site", failures=5)
@retry()
async def fetch_async(url: str) -> bytes:
    return url.encode()


class Shop(NetworkClient):
    @retry(state=lambda page: f"page {page}")
    async def page(self, ctx: object, page: int) -> list[int]:
        answer = await self.get("http://x/", ctx=ctx, params={"page": page})
        return answer.json(list[int])


async def main() -> None:
    assert_type(fetch("u", n=2), bytes)
    assert_type(await fetch_async("u"), bytes)
    assert_type(await Shop(timeouts=Timeouts(read=1)).page(None, 3), list[int])
    assert_type(executors.io.submit(fetch, "u").result(), bytes)
    assert_type(locks.run_locked("x", fetch, "u", timeout=1), bytes)
    fetch(7)  # error: arg-type
    await fetch_async()  # error: call-arg
    retry(strategy="quadratic")  # error: call-overload
    locks.run_locked("x", fetch, 7)  # error: arg-type
    executors.disk  # error: attr-defined
"""


def test_wrapped_functions_keep_their_types(tmp_path: Path) -> None:
    file = tmp_path / "users_code.py"
    file.write_text(USERS_CODE)
    expected = [
        (number, line.rpartition("# error: ")[2])
        for number, line in enumerate(USERS_CODE.splitlines(), 1)
        if "# error: " in line
    ]
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    found = re.findall(r":(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert [(int(line), code) for line, code in found] == expected, done.stdout + done.stderr
