"""Exchanges on loopback, each a different kind of website.

    python sites.py [--port 8700] [--still]

The program prints its port and serves until it is told to stop. Every ten seconds the next exchange
has something new. This command changes one: curl -d 'half the fees' http://127.0.0.1:8700/aurora
"""

import argparse
import asyncio
import html
import itertools
import secrets
import socket
from collections.abc import AsyncIterator

from aiohttp import web

PORT = 8700
PASSWORD = "open sesame"  # of ada, at vault
SLOW_SECONDS = 1.5
TURN_SECONDS = 10.0
PROMOS = {
    "aurora": "no fees in November",
    "nimbus": "50 USDT for a friend",
    "tortoise": "5 % on stakes, slowly",
    "gremlin": "a token for every bug",
    "abyss": "nobody ever read this",
    "kiosk": "a coffee with every trade",  # which is not in musterd.toml: try /watch
    "vault": "49.00 €",
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
        self.visits = itertools.count(1)  # of vault
        self.keys: set[str] = set()  # cookies of those who are logged in to vault

    def routes(self) -> list[web.RouteDef]:
        special = [web.get(f"/{name}", getattr(self, name)) for name in PROMOS if name in dir(self)]
        script = web.get("/nimbus/promo.txt", self.nimbus_promo)
        login = [web.get("/login", self.login_page), web.post("/login", self.log_in)]
        rest = [web.get("/{exchange}", self.plain), web.post("/{exchange}", self.change)]
        return [*special, script, *login, *rest]

    def page(self, exchange: str) -> web.Response:
        return _page(f'<p class="promo">{html.escape(self.promos[exchange])}</p>')

    async def plain(self, request: web.Request) -> web.Response:
        return self.page(self.known(request))

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

    async def vault(self, request: web.Request) -> web.Response:
        if request.cookies.get("key") not in self.keys:
            raise web.HTTPFound("/login")
        price = f'<p class="price">{html.escape(self.promos["vault"])}</p>'
        return _page(f'{price}<p class="visitors">{next(self.visits)} visitors</p>')

    async def login_page(self, _: web.Request) -> web.Response:
        fields = '<input name="user"><input name="password" type="password"><button>Log in</button>'
        return _page(f'<form method="post">{fields}</form><p>logins: {len(self.keys)}</p>')

    async def log_in(self, request: web.Request) -> web.Response:
        form = await request.post()
        if (form.get("user"), form.get("password")) != ("ada", PASSWORD):
            raise web.HTTPForbidden(text="who are you?")
        self.keys.add(key := secrets.token_hex())
        answer = web.HTTPSeeOther("/vault")
        answer.set_cookie("key", key, httponly=True)
        return answer

    async def change(self, request: web.Request) -> web.Response:
        exchange = self.known(request)
        self.promos[exchange] = await request.text()
        return web.Response(text=f"{exchange}: {self.promos[exchange]}\n")

    def known(self, request: web.Request) -> str:
        exchange = request.match_info["exchange"]
        if exchange not in self.promos:
            raise web.HTTPNotFound
        return exchange

    async def turning(self, _: web.Application) -> AsyncIterator[None]:
        """Change something somewhere every now and then, as long as the sites are served."""
        turning = asyncio.create_task(self.turn())
        yield
        turning.cancel()

    async def turn(self) -> None:
        for edition in itertools.count(2):
            for exchange, promo in PROMOS.items():
                await asyncio.sleep(TURN_SECONDS)
                price = f"{49 - edition % 2 * 10}.00 €"
                self.promos[exchange] = price if exchange == "vault" else f"{promo} ({edition})"


def _page(body: str) -> web.Response:
    text = f"<!doctype html><title>Exchange</title><body>{body}</body>"
    return web.Response(text=text, content_type="text/html")


def main() -> None:
    parser = argparse.ArgumentParser(description="Exchanges on loopback.")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes a free one")
    parser.add_argument("--still", action="store_true", help="nothing changes by itself")
    options = parser.parse_args()
    exchanges, application = Exchanges(), web.Application()
    application.add_routes(exchanges.routes())
    if not options.still:
        application.cleanup_ctx.append(exchanges.turning)
    listening = socket.create_server(("127.0.0.1", options.port))
    print(listening.getsockname()[1], flush=True)
    web.run_app(application, sock=listening, print=None, access_log=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
