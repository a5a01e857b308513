"""Metrics of the web process itself: its requests, and its requests to the daemon."""

import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from musterd.supervisor.web.feed import Feed
from musterd.supervisor.web.metrics import total

OTHER = "other"  # all unknown paths
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Meter:
    """ASGI middleware that counts requests by path; those outside `paths` count as one."""

    def __init__(self, app: ASGIApp, *, paths: frozenset[str], counts: "Counts") -> None:
        self._app = app
        self._paths = paths
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else OTHER
        status = "none"  # the client went away

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        began = time.monotonic()
        counts = self._counts
        counts.under_way.inc()
        try:
            await self._app(scope, receive, sending)
        finally:
            counts.under_way.dec()
            counts.requests.labels(path, status).inc()
            counts.seconds.labels(path).observe(time.monotonic() - began)


class Counts:
    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "musterd_web_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "musterd_web_request_seconds",
            "Time to answer a request",
            ["path"],
            registry=registry,
            buckets=BUCKETS,
        )
        self.under_way = Gauge(
            "musterd_web_requests_in_progress", "Requests being answered", registry=registry
        )

    def metrics(self, feed: Feed) -> Iterator[Metric]:
        yield total("musterd_web_questions", "Requests sent to the supervisor", feed.questions)
        yield total(
            "musterd_web_unanswered",
            "Requests that the supervisor did not answer in time, or at all",
            feed.failures,
        )
        yield from self._registry.collect()
