"""A site on loopback whose pages harm a browser, served by a thread of the test."""

import asyncio
import threading
from collections import Counter

from aiohttp import web

CHUNK = b"x" * 65536
ENDLESS_BYTES_MAX = 256 * 1024 * 1024  # if nobody disconnects, the test fails and the disk survives
HUGE_BYTES = 50 * 1024 * 1024

GOOD = "<title>good</title><p>well</p>"
PAGES = {
    "/good": GOOD,
    "/spin": "<title>spin</title><script>while (true) {}</script>",
    # Objects, which count towards V8's heap limit; typed arrays would not.
    "/hoard": "<title>hoard</title><script>const held = []; let n = 0;"
    "while (true) held.push({at: n++, more: [n, n + 1, n + 2]})</script>",
    "/dialogs": "<title>dialogs</title><script>"
    "alert('a'); const c = confirm('c'), p = prompt('p');"
    "document.title = `after ${c} ${p}`;"
    "onbeforeunload = e => { e.preventDefault(); return 'stay' }</script>",
    "/leaves": "<title>leaves</title><script>"
    "onbeforeunload = e => { e.preventDefault(); return 'stay' };"
    "onload = () => setTimeout(() => location.href = '/good')</script>",
    # Half of an emoji, as of a text that was cut, in all that a page may say.
    "/halves": "<title>halves</title><p></p><script>const half = 'half \\ud83d';"
    "document.title = document.querySelector('p').textContent = half;"
    "localStorage.setItem(half, half); history.replaceState(null, '', '#' + half);"
    "console.log(half); setTimeout(() => { throw new Error(half) }, 0);"
    "</script>",
    "/popups": "<title>popups</title><script>"
    "for (let n = 0; n < 5; n++) open('/good'); open('/good', '_blank', 'noopener')</script>",
    "/popup-alerts": "<title>popup</title><script>"
    "open('').document.write('<script>alert(1)<' + '/script>'); open('/alert')</script>",
    "/popup-spin": "<title>popup</title><script>open('/spin', '_blank', 'noopener')</script>",
    "/alert": "<title>alert</title><script>alert('from a popup')</script>",
    "/downloads": "<title>downloads</title><iframe src='/endless'></iframe>"
    "<a id='a' href='/endless' download='b'>b</a><script>a.click();"
    "const blob = new Blob(['x'.repeat(1e6)]); a.href = URL.createObjectURL(blob); a.click()"
    "</script>",
}


class TroubleSite:
    """`requested` counts the requests; `sent` counts the bytes of long answers."""

    def __init__(self) -> None:
        self.requested: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="trouble site")

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _open(self) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _close(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.requested[request.path_qs] += 1
        if path == "/never":  # sends no byte
            await asyncio.sleep(600)
        if path == "/half-once":  # incomplete the first time only
            path = "/half" if self.requested[request.path_qs] == 1 else "/good"
        if path == "/half":  # the page begins, and never ends
            return await self._stream(request, path, 1, "text/html", then=600)
        if path == "/huge":
            return await self._stream(request, path, HUGE_BYTES, "text/html")
        if path == "/endless":
            return await self._stream(request, path, ENDLESS_BYTES_MAX, "application/x-thing")
        text = PAGES.get(path, "<title>none</title>")
        status = 200 if path in PAGES else 404
        return web.Response(text=text, content_type="text/html", status=status)

    async def _stream(
        self, request: web.Request, path: str, size: int, kind: str, then: float = 0
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": kind})
        await answer.prepare(request)
        sent = 0
        while sent < size:
            await answer.write(CHUNK)
            sent += len(CHUNK)
            self.sent[path] += len(CHUNK)
        await asyncio.sleep(then)
        return answer
