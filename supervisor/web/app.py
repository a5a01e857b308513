"""The web application: health checks, status, metrics, and the routes of all paths.

/healthz   200 if the supervisor answered within two seconds, else 503
/readyz    200 if every pool has its minimum and the daemon accepts tasks, else 503
/status    the current state as JSON
/metrics   metrics for Prometheus; musterd_up 0 if the supervisor does not answer
/          the dashboard: page.py and api.py
"""

import asyncio
import contextlib
import platform
import time
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version

import msgspec
from msgspec import Raw, structs
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from musterd import __version__
from musterd.ipc.errors import MusterdError
from musterd.supervisor.api import rpc
from musterd.supervisor.api.metrics import FleetFigures
from musterd.supervisor.api.status import FleetStatus, VersionResult
from musterd.supervisor.config.http import parse_address
from musterd.supervisor.settings.sidecars import WebSettings
from musterd.supervisor.web import health, page
from musterd.supervisor.web.api import Api
from musterd.supervisor.web.feed import CHECK_FRESH_SECONDS, Feed
from musterd.supervisor.web.live import Live
from musterd.supervisor.web.meter import Counts, Meter
from musterd.supervisor.web.metrics import fleet_metrics, number
from musterd.supervisor.web.security import Guard, answer
from musterd.supervisor.web.stories import Stories
from musterd.supervisor.web.system import supervisor_metrics, system_metrics
from musterd.supervisor.web.token import Token

_fleet = msgspec.json.Decoder(FleetStatus).decode
_figures = msgspec.json.Decoder(FleetFigures).decode
_version = msgspec.json.Decoder(VersionResult).decode


class Pages:
    """The pages; each asks the feed for what it needs."""

    def __init__(self, settings: WebSettings, feed: Feed) -> None:
        self.settings = settings
        self.feed = feed
        self.counts = Counts()

    def routes(self) -> list[Route]:
        return [
            Route("/healthz", self.healthz),
            Route("/readyz", self.readyz),
            Route("/status", self.status),
            Route("/metrics", self.metrics),
        ]

    async def healthz(self, _request: Request) -> Response:
        began = time.monotonic()
        try:
            told = _version(await self.feed.ask(rpc.Version(), CHECK_FRESH_SECONDS))
        except (MusterdError, msgspec.DecodeError) as error:
            return answer(503, health.Unhealthy("unhealthy", str(error)))
        seconds = round(time.monotonic() - began, 6)
        return answer(200, health.Healthy("ok", told.version, told.pid, seconds))

    async def readyz(self, _request: Request) -> Response:
        try:
            fleet = _fleet(await self.feed.ask(rpc.Status()))
        except (MusterdError, msgspec.DecodeError) as error:
            return answer(503, health.Readiness("not ready", [str(error)], []))
        found = health.readiness(fleet)
        return answer(503 if found.reasons else 200, found)

    async def status(self, _request: Request) -> Response:
        try:
            return answer(200, await self._status())
        except (MusterdError, msgspec.DecodeError) as error:
            return answer(503, {"error": str(error)})

    async def metrics(self, request: Request) -> Response:
        figures = None
        with contextlib.suppress(MusterdError, msgspec.DecodeError):  # musterd_up 0
            figures = _figures(await self.feed.ask(rpc.Metrics()))
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        collected = _Collected([*self._families(figures)])
        return Response(encode(collected), media_type=media_type)

    def _families(self, figures: FleetFigures | None) -> Iterator[Metric]:
        yield number("musterd_up", "Whether the supervisor answered in time", figures is not None)
        if figures is not None:
            yield from fleet_metrics(figures)
            yield from supervisor_metrics(figures.pid)
        yield from system_metrics(self.settings.state_dir)
        yield from self.counts.metrics(self.feed)

    async def _status(self) -> health.StatusPage:
        asked = (
            rpc.Status(),
            rpc.ListBreakers(),
            rpc.ListSchedules(),
            rpc.ShowMemory(),
            rpc.Version(),
        )
        told = await asyncio.gather(*(self.feed.ask(params) for params in asked))
        fleet, daemon = _fleet(told[0]), _version(told[4])
        facts = structs.asdict(fleet)
        del facts["pools"]
        return health.StatusPage(
            at=time.time(),
            daemon=facts,
            queue=health.queue(fleet),
            pools=fleet.pools,
            breakers=_inside(told[1], "breakers"),
            schedules=_inside(told[2], "schedules"),
            memory=told[3],
            versions={
                "musterd": daemon.version,
                "python": daemon.python,
                "web": __version__,
                "web_python": platform.python_version(),
                "starlette": version("starlette"),
                "uvicorn": version("uvicorn"),
            },
        )


class _Collected(Collector):
    """Metric families in the form that encoders take."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _inside(answered: Raw, name: str) -> Raw:
    """Return one field of an answer, undecoded."""
    return msgspec.json.decode(answered, type=dict[str, Raw])[name]


def make_app(settings: WebSettings) -> tuple[Starlette, Live]:
    """Return the application, and its live pages, which must end before it can."""
    feed, stories = Feed(settings.control), Stories(settings.control)
    token = Token(settings.token_file)
    live = Live(feed, stories, actions=token.configured)
    api = Api(feed, live, stories, token, settings.redact)

    @contextlib.asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        token.usable()  # logs a problem now, not at the first action
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(each.run()) for each in (live, stories)]
            yield
            for each in running:
                each.cancel()
        await feed.close()

    pages = Pages(settings, feed)
    routes = [*pages.routes(), *api.routes(), *page.routes()]
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(Meter, paths=paths, counts=pages.counts),
        Middleware(Guard, hosts=settings.hosts, any_host=bool(parse_address(settings.listen).path)),
    ]
    return Starlette(routes=routes, middleware=middleware, lifespan=life), live
