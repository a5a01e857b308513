"""Five exchanges on loopback, each a different kind of website.

    python sites.py [--port 8700] [--turn SECONDS]

The program prints its port and serves until it is told to stop. Every SECONDS, the next exchange
gets another promo. So does this command: curl -d 'half the fees' http://127.0.0.1:8700/aurora
"""

import argparse
import asyncio
import html
import itertools
import signal

from aiohttp import web

PORT = 8700
SLOW_SECONDS = 1.5
TURN_SECONDS = 10.0
PROMOS = {
    "aurora": "no fees in November",
    "nimbus": "50 USDT for a friend",
    "tortoise": "5 % on stakes, slowly",
    "gremlin": "a token for every bug",
    "abyss": "nobody ever read this",
}

SCRIPT = """<script>
fetch("/nimbus/promo.txt").then(answer => answer.text()).then(promo => {
  const line = document.createElement("p");
  line.className = "promo";
  line.textContent = promo;
  document.body.replaceChildren(line);
});
</script>"""


class Exchanges:
    def __init__(self) -> None:
        self.promos = dict(PROMOS)
        self.moods = itertools.cycle(("broken", "well", "busy", "well"))  # of gremlin

    def routes(self) -> list[web.RouteDef]:
        pages = [web.get(f"/{name}", getattr(self, name)) for name in PROMOS]
        script = web.get("/nimbus/promo.txt", self.nimbus_promo)
        return [*pages, script, web.post("/{exchange}", self.change)]

    def page(self, exchange: str) -> web.Response:
        return _page(f'<p class="promo">{html.escape(self.promos[exchange])}</p>')

    async def aurora(self, _: web.Request) -> web.Response:
        return self.page("aurora")

    async def nimbus(self, _: web.Request) -> web.Response:
        return _page(f"<p>loading</p>{SCRIPT}")

    async def nimbus_promo(self, _: web.Request) -> web.Response:
        return web.Response(text=self.promos["nimbus"])

    async def tortoise(self, _: web.Request) -> web.Response:
        await asyncio.sleep(SLOW_SECONDS)
        return self.page("tortoise")

    async def gremlin(self, _: web.Request) -> web.Response:
        mood = next(self.moods)
        if mood == "broken":
            raise web.HTTPServiceUnavailable(text="something is in the works")
        if mood == "busy":
            return _page('<p class="notice">back in a moment</p>')
        return self.page("gremlin")

    async def abyss(self, _: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("it never answers")

    async def change(self, request: web.Request) -> web.Response:
        exchange = request.match_info["exchange"]
        if exchange not in self.promos:
            raise web.HTTPNotFound
        self.promos[exchange] = await request.text()
        return web.Response(text=f"{exchange}: {self.promos[exchange]}\n")

    async def turn(self, seconds: float) -> None:
        """Change a promo somewhere every now and then."""
        for edition in itertools.count(2):
            for exchange, promo in PROMOS.items():
                await asyncio.sleep(seconds)
                self.promos[exchange] = f"{promo}, edition {edition}"


def _page(body: str) -> web.Response:
    text = f"<!doctype html><title>Exchange</title><body>{body}</body>"
    return web.Response(text=text, content_type="text/html")


async def serve(port: int, turn_seconds: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    exchanges = Exchanges()
    application = web.Application()
    application.add_routes(exchanges.routes())
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(runner.addresses[0][1], flush=True)
    turning = asyncio.create_task(exchanges.turn(turn_seconds)) if turn_seconds else None
    await stop.wait()
    if turning is not None:
        turning.cancel()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description="Five exchanges on loopback.")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes a free one")
    parser.add_argument("--turn", type=float, default=TURN_SECONDS, help="0: nothing changes")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.turn))


if __name__ == "__main__":
    main()
