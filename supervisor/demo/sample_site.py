"""A small site of shops and promo codes on loopback, to parse without a network.

    python -m musterd.supervisor.demo.sample_site [--port N] [--until-stdin-closes]

prints its port as the first line and serves until it is stopped. The pages:

    /                  links (`a.promo`) to all of the promo pages
    /promo/NAME        h1, .price, .code, ul.terms; a few in other encodings (see PROMOS)
    /js                a promo page written by JavaScript after a request of its own
    /slow?seconds=S    a promo page after a delay
    /moved             redirects to the first promo page
    /waking            503 with Retry-After at the first request, a promo page from then on
    /busy              503 with Retry-After, always
    /gone              404
"""

import argparse
import asyncio
import html
import os
import signal
import sys
from typing import Literal

from aiohttp import web
from msgspec import Struct

HOST = "127.0.0.1"
SLOW_SECONDS = 1.5
SLOW_SECONDS_MAX = 60.0  # no request holds its connection longer
RETRY_AFTER_SECONDS = 1

Declared = Literal["header", "meta", "bom"]


class Promo(Struct, frozen=True):
    """One shop's offer, and the form of its page."""

    name: str
    title: str
    price: str
    code: str
    encoding: str = "utf-8"
    declared: Declared = "header"
    compressed: bool = False

    @property
    def path(self) -> str:
        return f"/promo/{self.name}"


PROMOS = (
    Promo("aurora-books", "Aurora Books: three for two", "14.90 EUR", "AURORA32"),
    Promo("bazaar", "Базар: скидка на чай", "349 ₽", "CHAI25", "windows-1251"),
    Promo("cafe-creme", "Café Crème: déjeuner offert", "12,50 EUR", "CREME12", "iso-8859-1"),
    Promo("delta-bikes", "Delta Bikes: free service", "0.00 EUR", "DELTAFREE", compressed=True),
    Promo("edo-paper", "江戸の紙：送料無料", "1,200 円", "EDO1200", "shift_jis", "meta"),
    Promo("fjord-wool", "Fjord Wool: winter sale", "899 kr", "FJORD9"),
    Promo("garden-gnomes", "Garden Gnomes & Co: buy one", "24.00 EUR", "GNOME24"),
    Promo("harbour-fish", "Harbour Fish: Friday catch", "17.35 GBP", "FRIDAY17"),
    Promo("iris-optics", "Iris Optics: second pair", "59.00 EUR", "IRIS2"),
    Promo("jade-tea", "玉茶：买一送一", "88 元", "JADE88", "gb18030", "meta"),
    Promo("kolobok", "Колобок: свежий хлеб", "99 р.", "KOLOB9", "koi8-r", "meta"),
    Promo("lumen-lamps", "Lumen Lamps: bright days", "31.20 EUR", "LUMEN31", compressed=True),
    Promo("mira-music", "Мира Музыка: струны", "450 ₽", "MIRA450", "utf-16", "bom"),
    Promo("nordlicht", "Nordlicht: Kerzen im Bündel", "9,99 EUR", "LICHT9", "iso-8859-15"),
    Promo("olive-grove", "Olive Grove: first press", "18.75 EUR", "OLIVE18"),
    Promo("pixel-print", "Pixel Print: posters", "7.00 EUR", "PIXEL7"),
    Promo("quartz-watch", "Quartz Watch: straps", "21.00 CHF", "QUARTZ21"),
    Promo("rossi-pasta", "Rossi Pasta: perché no?", "3,20 EUR", "ROSSI3", declared="bom"),
    Promo("sail-loft", "Sail Loft: canvas bags", "45.00 EUR", "SAIL45"),
    Promo("tundra-tents", "Tundra Tents: last season", "149.00 EUR", "TUNDRA149"),
    Promo("umbra-ink", "Umbra Ink: refill week", "6.40 EUR", "UMBRA6"),
    Promo("velo-verde", "Vélo Vert: casque offert", "0,00 EUR", "VELO0", declared="meta"),
    Promo("willow-toys", "Willow Toys: wooden trains", "27.80 EUR", "WILLOW27"),
    Promo("yarn-yard", "Yarn Yard: mixed skeins", "11.11 EUR", "YARN11"),
)
SCRIPTED = Promo("scripted", "Zephyr Kites: written by script", "33.00 EUR", "ZEPHYR33")
SLOW = Promo("slow", "Snail Mail: worth the wait", "1.00 EUR", "SNAIL1")
WAKING = Promo("waking", "Night Owl: open again", "5.55 EUR", "OWL5")

_PAGE = """<!doctype html>
<html><head>{meta}<title>{title}</title></head>
<body><h1>{title}</h1>
<p>Now for <span class="price">{price}</span> with <code class="code">{code}</code></p>
<ul class="terms"><li>one per customer</li><li>while stocks last</li></ul>
<a class="home" href="/">all promos</a></body></html>
"""

_SCRIPTED_PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>loading</title></head>
<body><main>loading</main>
<script>
fetch("/js/promo.json").then(answer => answer.json()).then(promo => {
  const add = (tag, name, text) => {
    const element = document.createElement(tag);
    element.className = name;
    element.textContent = text;
    document.querySelector("main").append(element);
  };
  document.querySelector("main").textContent = "";
  add("h1", "title", promo.title);
  add("span", "price", promo.price);
  add("code", "code", promo.code);
  document.title = promo.title;
});
</script></body></html>
"""


def promo_page(promo: Promo) -> web.Response:
    """Return the promo as a page, in its own encoding and declaration."""
    meta = f'<meta charset="{promo.encoding}">' if promo.declared == "meta" else ""
    fields = {key: html.escape(getattr(promo, key)) for key in ("title", "price", "code")}
    text = _PAGE.format(meta=meta, **fields)
    charset = f"; charset={promo.encoding}" if promo.declared == "header" else ""
    bom = "\ufeff" if promo.declared == "bom" and promo.encoding == "utf-8" else ""
    # Characters that an encoding lacks (the rouble sign) become character references.
    body = (bom + text).encode(promo.encoding, "xmlcharrefreplace")
    response = web.Response(body=body, headers={"Content-Type": f"text/html{charset}"})
    if promo.compressed:
        response.enable_compression()
    return response


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html")


def _unavailable() -> web.Response:
    return web.Response(
        status=503, text="back soon", headers={"Retry-After": str(RETRY_AFTER_SECONDS)}
    )


class SampleSite:
    """The site in the running event loop, for tests and the demo."""

    def __init__(self) -> None:
        self._promos = {promo.name: promo for promo in PROMOS}
        self._awake = False
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listen on loopback; port 0 takes a free one, which is then `self.port`."""
        app = web.Application()
        app.router.add_get("/", self._index)
        app.router.add_get("/promo/{name}", self._promo)
        app.router.add_get("/js", self._scripted)
        app.router.add_get("/js/promo.json", self._scripted_data)
        app.router.add_get("/slow", self._slow)
        app.router.add_get("/moved", self._moved)
        app.router.add_get("/waking", self._waking)
        app.router.add_get("/busy", self._busy)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _index(self, _: web.Request) -> web.Response:
        links = "\n".join(
            f'<li><a class="promo" href="{promo.path}">{html.escape(promo.title)}</a></li>'
            for promo in PROMOS
        )
        return _html(f"<!doctype html><title>Promos</title><h1>Promos</h1><ul>{links}</ul>")

    async def _promo(self, request: web.Request) -> web.Response:
        promo = self._promos.get(request.match_info["name"])
        if promo is None:
            raise web.HTTPNotFound(text="no such promo")
        return promo_page(promo)

    async def _scripted(self, _: web.Request) -> web.Response:
        return _html(_SCRIPTED_PAGE)

    async def _scripted_data(self, _: web.Request) -> web.Response:
        fields = {"title": SCRIPTED.title, "price": SCRIPTED.price, "code": SCRIPTED.code}
        return web.json_response(fields)

    async def _slow(self, request: web.Request) -> web.Response:
        try:
            seconds = float(request.query.get("seconds", SLOW_SECONDS))
        except ValueError as error:
            raise web.HTTPBadRequest(text="seconds must be a number") from error
        await asyncio.sleep(min(max(seconds, 0.0), SLOW_SECONDS_MAX))
        return promo_page(SLOW)

    async def _moved(self, _: web.Request) -> web.Response:
        raise web.HTTPFound(PROMOS[0].path)

    async def _waking(self, _: web.Request) -> web.Response:
        if self._awake:
            return promo_page(WAKING)
        self._awake = True
        return _unavailable()

    async def _busy(self, _: web.Request) -> web.Response:
        return _unavailable()


def _stop_at_end_of_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop.set()


async def serve(port: int, *, until_stdin_closes: bool) -> None:
    """Print the port and serve until SIGTERM or SIGINT, or until standard input ends."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:  # the site ends with its parent, however that ends
        try:
            loop.add_reader(sys.stdin.fileno(), _stop_at_end_of_stdin, stop)
        except PermissionError as error:  # a file, or /dev/null: epoll cannot wait for it
            raise SystemExit("--until-stdin-closes: standard input must be a pipe") from error
    site = SampleSite()
    await site.start(port)
    print(site.port, flush=True)
    await stop.wait()
    await site.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="A sample site of promo codes on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="stop when standard input, a pipe, ends"
    )
    options = parser.parse_args()
    asyncio.run(serve(options.port, until_stdin_closes=options.until_stdin_closes))


if __name__ == "__main__":
    main()
