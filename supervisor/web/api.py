"""The HTTP interface of the dashboard.

GET  /api/live            snapshots of the fleet, as server-sent events
GET  /api/tasks           tasks by state, pool and words: ?state=failed&pool=parser&q=shop
                          with node=NAME those of the cluster's node, with node=* those of all nodes
GET  /api/task?id=ID      one task: attempts and history; with the token, arguments and tracebacks
GET  /api/artefact?id=ID&name=NAME
                          a file that a failed attempt left; needs the token
GET  /api/changes         changes of schedules with notify in one line each, newest first
GET  /api/schedules       schedules by words: ?q=shop, also those that snapshots have no room for
GET  /api/schedule?name=N the keys of a schedule that was added; needs the token
GET  /api/history?name=N  results of a schedule that differ, newest first; with the token, the diffs
POST /api/actions         see actions.py; needs the token
POST /api/token           204 if the token is correct

The token is sent as "Authorization: Bearer TOKEN". There are no cookies: browsers add nothing to
requests that other pages make.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from musterd.ipc.errors import MusterdError
from musterd.ipc.secrets.names import is_sensitive
from musterd.ipc.watching.difference import summary, unified_diff
from musterd.supervisor.api import rpc
from musterd.supervisor.api.history import ChangeList, HistoryItem, HistoryList
from musterd.supervisor.api.status import (
    ArtefactPart,
    ScheduleKeys,
    ScheduleList,
    TaskList,
    TaskStatus,
)
from musterd.supervisor.config.secrets import HIDDEN, sounds_secret
from musterd.supervisor.text.printable import printable
from musterd.supervisor.web import actions, snapshot
from musterd.supervisor.web.feed import Feed, NoAnswer
from musterd.supervisor.web.live import Live, TooManyPages
from musterd.supervisor.web.security import Rates, answer
from musterd.supervisor.web.stories import Stories
from musterd.supervisor.web.token import Token

# Requests of one address without the token: behind a proxy all callers have one address, and
# noise must not keep out a caller that has the token.
ASKED_PER_SECOND, ASKED_BURST = 20.0, 60
WRONG_PER_SECOND, WRONG_BURST = 0.5, 10  # wrong tokens, of all addresses together
LISTED_MAX = 200  # rows of an answer
SEARCHED_MAX = rpc.LIST_MAX  # newest tasks that a search covers
LIST_FRESH_SECONDS = 2.0  # searches share one list for this long
QUERY_CHARS_MAX = 200
ALL_NODES = "*"  # of a cluster
ARGUMENTS_CHARS_MAX = 4000
CHANGES_LISTED = 20
CHANGES_FRESH_SECONDS = 5.0  # pages share one answer for this long
DIFF_CHARS_MAX = 20_000  # of one change; `musterctl changes --diff` shows all of it

# What sites wrote must never run here, even if a browser is made to show it.
SANDBOX = "sandbox; default-src 'none'; frame-ancestors 'none'"

T = TypeVar("T")
_STATES = frozenset(
    ("", "finished", "queued", "waiting", "running", "succeeded", "failed", "cancelled", "expired")
)


class Refused(Exception):
    """A request that is answered with an HTTP status and a reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    def __init__(
        self, feed: Feed, live: Live, stories: Stories, token: Token, redact: tuple[str, ...]
    ) -> None:
        self._feed = feed
        self._live = live
        self._stories = stories
        self._token = token
        self._redact = frozenset(redact)
        self._asked = Rates(ASKED_PER_SECOND, ASKED_BURST)
        self._wrong = Rates(WRONG_PER_SECOND, WRONG_BURST)

    def routes(self) -> list[Route]:
        return [
            Route("/api/live", self._guarded(self.live)),
            Route("/api/tasks", self._guarded(self.tasks)),
            Route("/api/task", self._guarded(self.task)),
            Route("/api/artefact", self._guarded(self.artefact)),
            Route("/api/changes", self._guarded(self.changes)),
            Route("/api/schedules", self._guarded(self.schedules)),
            Route("/api/schedule", self._guarded(self.schedule)),
            Route("/api/history", self._guarded(self.history)),
            Route("/api/actions", self._guarded(self.act), methods=["POST"]),
            Route("/api/token", self._guarded(self.check_token), methods=["POST"]),
        ]

    def _guarded(self, method: Any) -> Any:
        """Return a handler that limits rates and turns every error into an answer."""

        async def guarded(request: Request) -> Response:
            try:
                if not self._has_token(request) and not self._asked.take(_address_of(request)):
                    raise Refused(429, "too many requests: wait a moment")
                response: Response = await method(request)
            except (Refused, MusterdError) as error:
                return answer(_status_of(error), {"error": str(error)})
            except msgspec.DecodeError as error:
                return answer(502, {"error": f"cannot read the supervisor's answer: {error}"})
            return response

        return guarded

    # -- reading ------------------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        address = _address_of(request)
        self._live.admit(address)
        at_once = {"x-accel-buffering": "no"}  # said to nginx, which would collect them
        return StreamingResponse(
            self._events(address), headers=at_once, media_type="text/event-stream"
        )

    async def _events(self, address: str) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        async for told in self._live.follow(address):
            yield b"data: " + told + b"\n\n"

    async def tasks(self, request: Request) -> Response:
        query = request.query_params
        state, pool = query.get("state", ""), query.get("pool", "")
        words = query.get("q", "").lower().split()
        if state not in _STATES:
            raise Refused(400, f"unknown state: give one of {', '.join(sorted(_STATES - {''}))}")
        node = query.get("node", "")
        if max(len(pool), len(node), len(query.get("q", ""))) > QUERY_CHARS_MAX:
            raise Refused(400, f"more than {QUERY_CHARS_MAX} characters")
        rows, more = await self._rows(state, pool, node)
        found = [row for row in rows if _matches(row, words)]
        shown = found[:LISTED_MAX]
        return answer(
            200,
            {"rows": shown, "found": len(found), "searched": len(rows), "more": more},
        )

    async def _rows(self, state: str, pool: str, node: str) -> tuple[list[dict[str, Any]], bool]:
        if not node and state == "running":
            running = await self._live.running()
            return [r for r in running if not pool or r["name"].startswith(f"{pool}.")], False
        asked: rpc.Params = rpc.ListTasks(state=state, pool=pool, limit=SEARCHED_MAX)  # type: ignore[arg-type]
        if node:
            named = "" if node == ALL_NODES else node
            asked = rpc.ListClusterTasks(state, pool, named, SEARCHED_MAX)  # type: ignore[arg-type]
        told = await self._feed.ask(asked, LIST_FRESH_SECONDS)
        listed = msgspec.json.decode(told, type=TaskList)
        return [snapshot.task_row(task) for task in listed.tasks], listed.more

    async def task(self, request: Request) -> Response:
        id_ = request.query_params.get("id", "")
        try:
            asked: rpc.Params = msgspec.convert({"id": id_, "value": False}, rpc.GetTask)
            if request.query_params.get("node"):
                asked = msgspec.convert({"id": id_}, rpc.GetClusterTask)
        except msgspec.ValidationError as error:
            raise Refused(400, f"invalid task id: {error}") from error
        entitled = self._is_entitled(request)
        found = msgspec.json.decode(await self._feed.act(asked), type=TaskStatus)
        shown = snapshot.task_row(found)
        shown |= {"crashes": found.crashes, "worker": found.worker, "policy": found.policy}
        shown["node"] = found.node
        shown |= {"progress": found.progress, "progress_text": found.progress_text}
        shown["attempts"] = [
            {
                "attempt": each.attempt,
                "at": each.at,
                "worker": each.worker,
                "error": f"{each.failure.type or each.failure.kind}: {each.failure.message}",
                "traceback": each.failure.traceback if entitled else "",
            }
            for each in found.attempts
        ]
        if found.failure is not None:
            shown["error"] = f"{found.failure.type or found.failure.kind}: {found.failure.message}"
            shown["traceback"] = found.failure.traceback if entitled else ""
        if entitled:
            shown["artefacts"] = found.artefacts
        if entitled and found.args is not None:
            shown["args"] = self.arguments(found.args)
        shown["story"] = self._stories.of(id_)
        shown["entitled"] = entitled
        return answer(200, shown)

    async def artefact(self, request: Request) -> Response:
        """Send a file of a failed task: to be saved, never to be shown, whatever is in it."""
        self._entitle(request)
        query = request.query_params
        try:
            asked = msgspec.convert(
                {"id": query.get("id", ""), "name": query.get("name", "")}, rpc.ReadArtefact
            )
        except msgspec.ValidationError as error:
            raise Refused(400, f"invalid name of an artefact: {error}") from error
        first = await self._part(asked)  # an error still has a status
        # Only names that the daemon knows come here, and those have no quotes.
        headers = {
            "content-disposition": f'attachment; filename="{asked.name}"',
            "content-security-policy": SANDBOX,
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(
            self._parts(asked, first), headers=headers, media_type="application/octet-stream"
        )

    async def _parts(self, asked: rpc.ReadArtefact, part: bytes) -> AsyncIterator[bytes]:
        offset = 0
        while part:
            yield part
            if len(part) < rpc.ARTEFACT_PART_BYTES:
                return
            offset += len(part)
            part = await self._part(msgspec.structs.replace(asked, offset=offset))

    async def _part(self, asked: rpc.ReadArtefact) -> bytes:
        return msgspec.json.decode(await self._feed.act(asked), type=ArtefactPart).data

    async def changes(self, request: Request) -> Response:
        asked = rpc.ListChanges(limit=CHANGES_LISTED)
        told = await self._feed.ask(asked, CHANGES_FRESH_SECONDS)
        listed = msgspec.json.decode(told, type=ChangeList).changes
        rows = [
            {
                "schedule": each.schedule,
                "number": each.number,
                "at": each.at,
                "summary": each.summary,
                "task": each.task,
            }
            for each in reversed(listed)
        ]
        return answer(200, {"rows": rows})

    async def schedules(self, request: Request) -> Response:
        query = request.query_params.get("q", "")
        if len(query) > QUERY_CHARS_MAX:
            raise Refused(400, f"more than {QUERY_CHARS_MAX} characters")
        rows: list[dict[str, Any]] = []
        more, after = True, ""
        while more:
            told = await self._feed.ask(rpc.ListSchedules(after=after), LIST_FRESH_SECONDS)
            listed = msgspec.json.decode(told, type=ScheduleList)
            rows += snapshot.schedule_rows(listed.schedules)
            more = listed.more and bool(listed.schedules)
            after = rows[-1]["name"] if rows else ""
        found = [row for row in rows if _matches(row, query.lower().split())]
        return answer(200, {"rows": found[:LISTED_MAX], "found": len(found)})

    async def schedule(self, request: Request) -> Response:
        """Answer with the keys of a schedule, to be edited; of arguments, secrets are hidden."""
        self._entitle(request)
        told = await self._feed.act(_named(request, rpc.GetSchedule))
        found = msgspec.json.decode(told, type=ScheduleKeys)
        return answer(200, {"name": found.name, "keys": self._redacted(found.keys)})

    async def history(self, request: Request) -> Response:
        asked = _named(request, rpc.ShowHistory)
        entitled = self._is_entitled(request)
        told = await self._feed.ask(asked, CHANGES_FRESH_SECONDS)
        entries = msgspec.json.decode(told, type=HistoryList).entries
        rows = await asyncio.to_thread(history_rows, entries, with_diff=entitled)
        return answer(200, {"name": asked.name, "rows": rows, "entitled": entitled})

    def arguments(self, args: Any) -> str:
        """Format arguments as JSON; hide values named like a secret, keep references to secrets."""
        text = msgspec.json.format(msgspec.json.encode(self._redacted(args)), indent=2).decode()
        cut = len(text) > ARGUMENTS_CHARS_MAX
        return text[:ARGUMENTS_CHARS_MAX] + (" ... (cut)" if cut else "")

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._redacted_at(str(name), each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._redacted(each) for each in value]
        return value

    def _redacted_at(self, name: str, value: Any) -> Any:
        secret = is_sensitive(name, self._redact) or sounds_secret(name)
        is_reference = name == "$secret" or (isinstance(value, dict) and [*value] == ["$secret"])
        return HIDDEN if secret and not is_reference else self._redacted(value)

    # -- acting -------------------------------------------------------------------------------

    async def check_token(self, request: Request) -> Response:
        self._entitle(request)
        return Response(status_code=204)

    async def act(self, request: Request) -> Response:
        self._entitle(request)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "give the action as application/json")
        try:
            action = actions.decode(await request.body())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(400, f"invalid action: {error}") from error
        except ClientDisconnect as error:  # also raised for a body that is too long
            raise Refused(413, "the body is incomplete or too long") from error
        words = printable(action.words())
        caller = request.client.host if request.client is not None else "the Unix socket"
        try:
            told = await self._feed.act(action.request())
            if isinstance(action, actions.EditSchedule):
                told = await self._feed.act(action.edited(told))
            done = action.outcome(told)
        except MusterdError as error:
            _log(f"{words} requested by {caller}: {error}")
            raise
        _log(f"{words} requested by {caller}: {done}")
        self._feed.forget()
        self._live.look()
        return answer(200, actions.Done(done))

    def _is_entitled(self, request: Request) -> bool:
        """Return whether the token was given; refuse a wrong one, whatever the request."""
        if "authorization" not in request.headers:
            return False
        self._entitle(request)
        return True

    def _entitle(self, request: Request) -> None:
        if not self._token.configured:
            raise Refused(403, "actions are off: no token is configured (http.token_file)")
        if not self._token.usable():
            raise Refused(403, "actions are off: the token cannot be read: see the log")
        if self._has_token(request):
            return
        if not self._wrong.take(""):
            raise Refused(429, "too many wrong tokens: wait a moment")
        raise Refused(401, "give the token of http.token_file")

    def _has_token(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._token.fits(given.strip())


def history_rows(entries: list[HistoryItem], *, with_diff: bool) -> list[dict[str, Any]]:
    """Return results of a schedule, newest first, each compared with the one before."""
    values = {each.number: each.value for each in entries}
    rows = []
    for place, each in enumerate(entries):
        before = each.before or (entries[place - 1].number if place else 0)
        old, new = values.get(before), each.value
        row: dict[str, Any] = {"number": each.number, "at": each.at, "task": each.task}
        row |= {"changed": each.changed, "cut": each.cut, "summary": "", "diff": ""}
        if old is not None and new is not None:
            row["summary"] = summary(old, new)
            diff = unified_diff(old, new) if with_diff else ""
            cut = len(diff) > DIFF_CHARS_MAX
            row["diff"] = diff[:DIFF_CHARS_MAX] + ("\n... (cut)" if cut else "")
        rows.append(row)
    return rows[::-1]


def _address_of(request: Request) -> str:
    """Return the caller's address; "" on a Unix socket."""
    return request.client.host if request.client is not None else ""


def _named(request: Request, kind: type[T]) -> T:
    """Return the question about the schedule that the request names."""
    try:
        return msgspec.convert({"name": request.query_params.get("name", "")}, kind)
    except msgspec.ValidationError as error:
        raise Refused(400, f"invalid name of a schedule: {error}") from error


def _matches(row: dict[str, Any], words: list[str]) -> bool:
    if not words:
        return True
    text = " ".join(str(value) for value in row.values()).lower()
    return all(word in text for word in words)


_STATUS = {
    rpc.NO_SUCH_NAME: 404,
    rpc.NOT_ALLOWED: 403,
    rpc.LIMIT_REACHED: 503,
    rpc.FAILED: 409,
    rpc.INVALID_PARAMS: 400,
}


def _status_of(error: Exception) -> int:
    match error:
        case Refused():
            return error.status
        case rpc.RpcError():
            return _STATUS.get(error.code, 502)
        case TooManyPages():
            return 503
        case NoAnswer():
            return 504
    return 502


def _log(words: str) -> None:
    print(f"musterd web: {words}", file=sys.stderr, flush=True)
