"""ctx.session: cookies and local storage that outlive tasks, workers and the daemon.

    async with ctx.session("acme") as session:        `with` in handlers that are not async
        session.cookies, session.storage              loaded; kept when the block ends

The supervisor gives a session to one task at a time, or to as many as `concurrent` says. So nobody
waits here, and nobody else changes the session meanwhile. What is kept is encrypted here: nobody
else has the key (ipc/secrets/sessions.py).

A session that is missing, or cannot be opened, is made by its login. A handler that raises
LoggedOut is called once more, after another login. Where a task logs in, the attempt ends instead,
and the supervisor runs the login task before it begins anew (core/tasks/logins.py). Where several
tasks use a session at once, a lock of the supervisor sees to one login at a time, and the others
take what it has made.
"""

import fnmatch
import functools
import importlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from musterd.ipc.errors import LoggedOut, SessionError
from musterd.ipc.secrets import sessions as sealing
from musterd.ipc.secrets.sessions import DAY_NS, SessionRule, Unreadable
from musterd.ipc.wire.messages import (
    LOGGED_IN,
    LOGIN_FAILED,
    LOGIN_WANTED,
    NO_LOGIN,
    SESSION_PREFIX,
    STATE_BYTES_MAX,
    Lease,
    LoadState,
    SaveState,
    StateAnswer,
)
from musterd.workers.authoring.base import Context, Permanent, Worker
from musterd.workers.authoring.settings import settings
from musterd.workers.texts import shown_whole

if TYPE_CHECKING:
    from musterd.workers.authoring.request_channel import RequestChannel

SESSION_BYTES_MAX = STATE_BYTES_MAX - 1024  # of cookies and storage together; the rest is the seal
COOKIES_MAX = 1000
ORIGINS_MAX = 100  # with local storage
LOGIN_SECONDS = 300.0  # for the login of another task; the task's own timeout comes first
SAVE_AGAIN_NS = DAY_NS  # an unchanged session is saved so often, so that it is kept on
EXPIRES_MAX = 253_402_300_799.0  # the end of 9999: dates in HTTP and browsers know no later one
HIDDEN_CHARS_MIN = 16  # of a value that is kept out of logs: shorter ones occur by chance

log = logging.getLogger("musterd.task")


class UnusableSession(SessionError, Permanent):
    """This session can never be used like that."""


class Cookie(Struct, frozen=True, kw_only=True):
    """A cookie. A domain with a dot before it is for all hosts below, too."""

    name: str
    value: str
    domain: str
    path: str = "/"
    expires: float = 0.0  # in seconds since 1970; 0: when the site says so
    secure: bool = False
    http_only: bool = False
    same_site: str = ""  # "Strict", "Lax", "None" or ""

    def __post_init__(self) -> None:
        # Sites choose how long a cookie lasts; browsers' tools write -1 for "when the site says".
        if self.expires > EXPIRES_MAX:
            force_setattr(self, "expires", EXPIRES_MAX)
        elif self.expires == -1 or math.isnan(self.expires):
            force_setattr(self, "expires", 0.0)

    @property
    def host(self) -> str:
        """Domain without the dot before it."""
        return self.domain.lstrip(".")

    @property
    def place(self) -> tuple[str, str, str]:
        """What tells cookies apart: another one with the same takes its place."""
        return self.name, self.domain.lower(), self.path


class _Data(Struct, frozen=True):
    """What is encrypted."""

    cookies: list[Cookie] = []
    storage: dict[str, dict[str, str]] = {}


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(_Data).decode


class Session:
    """A session in the hands of one attempt. Of blocks inside each other the outermost counts.

    `name` is its name, `ctx` the task's context. `cookies` is a list of Cookie, and `storage` has
    the local storage of each site: {"https://shop.example": {"token": "..."}}.
    """

    def __init__(
        self, channel: "RequestChannel", lease: Lease, rule: SessionRule, ctx: Context
    ) -> None:
        self.name = lease.session
        self.ctx = ctx
        self.cookies: list[Cookie] = []
        self.storage: dict[str, dict[str, str]] = {}  # by origin, "https://shop.example"
        self._channel = channel
        self._lease = lease
        self._rule = rule
        self._depth = 0
        self._kept = b""  # the data as they were loaded or saved last
        self._login_ns = 0  # by the wall clock; 0: nobody has logged in
        self._saved_ns = 0
        self._logged_out = False  # what is kept does not let anybody in
        self._logins = 0  # of this attempt
        self._logging_in = False
        self._logs_in = rule.login_task == f"{channel.worker.pool}.{lease.method}"
        self._login = NO_LOGIN  # what became of a login of this attempt

    @property
    def worker(self) -> Worker:
        """The worker that runs the task, for logins: its fetch() or open_page()."""
        return self._channel.worker

    def set_cookie(self, name: str, value: str, domain: str, **fields: Any) -> None:
        """Add a cookie, in place of one with the same name, domain and path."""
        made = Cookie(name=name, value=value, domain=domain, **fields)
        self.cookies = [*(each for each in self.cookies if each.place != made.place), made]

    def clear(self) -> None:
        """Forget cookies and storage; what is kept follows with the next save."""
        self.cookies, self.storage = [], {}

    def is_logged_out(self, url: str, status: int = 0) -> bool:
        """Tell whether this answer of a site means that nobody is logged in."""
        if self._logging_in or self._logs_in:
            return False  # it has to look at the page of the login
        fits = any(fnmatch.fnmatchcase(url, pattern) for pattern in self._rule.logged_out)
        return fits or status == 401

    # -- blocks -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._begin(awaited=False)
        if self._depth == 1:
            try:
                self._load(self._ask_to_load())
                if self._wants_login():
                    self._log_in()
            except BaseException:
                self._depth = 0
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._ends(kind):
            if self._logs_in and kind is None:
                self._logged_in()
            self.save()

    async def __aenter__(self) -> Self:
        self._begin(awaited=True)
        if self._depth == 1:
            try:
                self._load(await self._aask_to_load())
                if self._wants_login():
                    await self._alog_in()
            except BaseException:
                self._depth = 0
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: object
    ) -> None:
        if self._ends(kind):
            if self._logs_in and kind is None:
                self._logged_in()
            await self.asave()

    def _begin(self, *, awaited: bool) -> None:
        self._channel.check(self._lease, "ctx.session()", awaited=awaited)
        self._depth += 1

    def _ends(self, kind: type[BaseException] | None) -> bool:
        """Tell whether the outermost block ends, and what it leaves is to be kept.

        Sites change their cookies at any time, so these are kept after a failure as well; not after
        an interruption, which waits for nothing.
        """
        self._depth -= 1
        if kind is not None and issubclass(kind, LoggedOut):
            self._logged_out = True
        return (
            not self._depth
            and not self._logged_out
            and (kind is None or issubclass(kind, Exception))
        )

    def may_log_in_again(self) -> bool:
        """Tell whether another login may help a handler that has raised LoggedOut."""
        self._logged_out = True
        if self._rule.login_task:
            self._login = LOGIN_WANTED
        elif self._logins:
            self._login = LOGIN_FAILED
        return bool(self._rule.login) and not self._logins

    def login_outcome(self, *, failed: bool) -> int:
        """Return what the attempt, which has ended, says about the login of its session."""
        if self._logs_in:
            return LOGIN_FAILED if failed else NO_LOGIN
        return self._login if failed or self._login == LOGGED_IN else NO_LOGIN

    # -- loading and saving -------------------------------------------------------------------

    def save(self) -> None:
        """Keep the session now, if it has changed; on disk when save() returns."""
        self._channel.check(self._lease, "session.save()")
        data = self._data_to_save()
        if data is not None:
            if self._rule.concurrent > 1 and self._is_older(self._ask_to_load()):
                return
            question = self._to_save(data)
            _check(self._channel.ask(self._lease, "session.save()", question))
            self._saved(data)

    async def asave(self) -> None:
        """Keep the session now, in an async handler."""
        self._channel.check(self._lease, "session.asave()", awaited=True)
        data = self._data_to_save()
        if data is not None:
            if self._rule.concurrent > 1 and self._is_older(await self._aask_to_load()):
                return
            question = self._to_save(data)
            _check(await self._channel.ask_async(self._lease, "session.asave()", question))
            self._saved(data)

    def _question(self) -> LoadState:
        return LoadState(self._channel.number(), self._key, self._lease.lease)

    def _ask_to_load(self) -> bytes | None:
        answer = self._channel.ask(self._lease, "ctx.session()", self._question())
        return _check(answer).value

    async def _aask_to_load(self) -> bytes | None:
        answer = await self._channel.ask_async(self._lease, "ctx.session()", self._question())
        return _check(answer).value

    @property
    def _key(self) -> str:
        return f"{SESSION_PREFIX}{self.name}"

    def _load(self, kept: bytes | None) -> None:
        if kept is None:
            return
        try:
            sealed = sealing.read_head(kept)
            plain = sealing.unseal(_key(self.name), self.name, sealed)
            data = _decode(plain)
        except (Unreadable, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._unreadable(error)
            return
        if sealed.login_wall_ns > self._login_ns:
            self._logged_out = False  # somebody has logged in since this attempt found out
        self.cookies, self.storage = list(data.cookies), {**data.storage}
        self._kept, self._login_ns, self._saved_ns = (
            plain,
            sealed.login_wall_ns,
            sealed.saved_wall_ns,
        )
        self._hide()

    def _unreadable(self, error: Exception) -> None:
        why = str(error) if isinstance(error, Unreadable) else "its content cannot be read"
        if not self._rule.login and not self._rule.login_task:
            raise UnusableSession(
                f"session {self.name!r} cannot be opened: {why}; it has no login that could make "
                f"it anew: restore its key, or musterctl sessions forget {self.name}"
            )
        self._say(logging.WARNING, f"cannot be opened and is made anew: {why}")

    def _is_older(self, kept: bytes | None) -> bool:
        """Tell whether somebody has logged in since this attempt loaded the session."""
        try:
            return kept is not None and sealing.read_head(kept).login_wall_ns > self._login_ns
        except Unreadable:
            return False

    def _data_to_save(self) -> bytes | None:
        """Return what is to be kept; None if it is kept already."""
        data = _Data(*self._own_sites())
        if len(data.cookies) > COOKIES_MAX or len(data.storage) > ORIGINS_MAX:
            raise UnusableSession(
                f"session {self.name!r} has {len(data.cookies)} cookies and storage of "
                f"{len(data.storage)} sites, over the limits of {COOKIES_MAX} and {ORIGINS_MAX}; "
                f"name those to keep: [sessions.{self.name}] sites = [...]"
            )
        try:
            plain = _encode(data)
            _decode(plain)
        except (TypeError, ValueError, RecursionError) as error:  # a handler put it there
            raise UnusableSession(f"session {self.name!r} cannot be kept: {error}") from None
        if len(plain) > SESSION_BYTES_MAX:
            raise UnusableSession(
                f"session {self.name!r} has {len(plain)} bytes, over the limit of "
                f"{SESSION_BYTES_MAX}; name the sites to keep: [sessions.{self.name}] sites = [...]"
            )
        fresh = time.time_ns() - self._saved_ns < SAVE_AGAIN_NS
        return None if plain == self._kept and fresh else plain

    def _own_sites(self) -> tuple[list[Cookie], dict[str, dict[str, str]]]:
        sites, now = self._rule.sites, time.time()
        cookies = [
            each
            for each in sorted(self.cookies, key=lambda each: (each.domain, each.path, each.name))
            if (not each.expires or each.expires > now) and _is_of(each.host, sites)
        ]
        storage = {
            origin: values
            for origin, values in sorted(self.storage.items())
            if values and _is_of(_host_of(origin), sites)
        }
        return cookies, storage

    def _to_save(self, plain: bytes) -> SaveState:
        self._saved_ns = time.time_ns()
        value = sealing.seal(
            _key(self.name),
            self.name,
            plain,
            login_ns=self._login_ns,
            saved_ns=self._saved_ns,
            site=self.cookies[0].host if self.cookies else _host_of(next(iter(self.storage), "")),
        )
        number, keep_ns = self._channel.number(), self._rule.keep_ns
        return SaveState(number, self._key, value, keep_ns, self._lease.lease)

    def _saved(self, plain: bytes) -> None:
        self._kept = plain
        self._hide()
        self._say(logging.DEBUG, f"is saved, {len(plain)} bytes")

    def _hide(self) -> None:
        """Keep values out of logs and errors, and those that no page shows out of results."""
        values = [each.value for each in self.cookies]
        values += [text for stored in self.storage.values() for text in stored.values()]
        own = [each.value for each in self.cookies if each.http_only]
        self._channel.vault.hide(
            f"session {self.name}",
            [text for text in values if len(text) >= HIDDEN_CHARS_MIN],
            [text for text in own if len(text) >= HIDDEN_CHARS_MIN],
        )

    def _say(self, level: int, what: str) -> None:
        extra = {"MUSTERD_TASK": self._lease.id, "MUSTERD_ATTEMPT": self._lease.attempt}
        log.log(level, "session %s %s", self.name, what, extra=extra)

    # -- logging in ---------------------------------------------------------------------------

    def _wants_login(self) -> bool:
        if self._login_ns and not self._logged_out:
            return False
        if self._rule.login_task and not self._logs_in:
            self._login = LOGIN_WANTED
            raise LoggedOut(
                f"nobody is logged in to session {self.name!r}: its login task, "
                f"{self._rule.login_task}, has to run first"
            )
        return bool(self._rule.login)

    def _log_in(self) -> None:
        with self._channel.lock(self._lease, self._key, LOGIN_SECONDS):
            if self._somebody_has(self._ask_to_load() if self._rule.concurrent > 1 else None):
                return
            function = self._login_function()
            if inspect.iscoroutinefunction(function):
                raise UnusableSession(
                    f"the login of session {self.name!r}, {self._rule.login}, is async, and this "
                    "task is not: use the session in tasks that are async, or write a plain login"
                )
            arguments = self._login_arguments()
            with self._trying():
                function(self, **arguments)
                self._logged_in()
            self.save()

    async def _alog_in(self) -> None:
        async with self._channel.lock(self._lease, self._key, LOGIN_SECONDS):
            kept = await self._aask_to_load() if self._rule.concurrent > 1 else None
            if self._somebody_has(kept):
                return
            function, arguments = self._login_function(), self._login_arguments()
            with self._trying():
                made = function(self, **arguments)
                if inspect.isawaitable(made):
                    await made
                self._logged_in()
            await self.asave()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Note whether the login works."""
        self._logging_in, self._login = True, LOGIN_FAILED
        try:
            yield
        finally:
            self._logging_in = False
        self._login = LOGGED_IN

    def _somebody_has(self, kept: bytes | None) -> bool:
        """Take over the login of another task that came first."""
        if kept is not None and self._is_older(kept):
            self._load(kept)
            if not self._is_older(kept):  # it could be opened
                return True
        self._say(logging.INFO, "logs in")
        self._logins += 1
        self._logged_out = False  # a login may enter the session itself
        return False

    def _login_function(self) -> Callable[..., Any]:
        module, _, name = self._rule.login.partition(":")
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UnusableSession(
                f"the login of session {self.name!r}, {self._rule.login}, cannot be imported: "
                f"{error}"
            ) from error
        return function

    def _login_arguments(self) -> dict[str, Any]:
        opened = self._channel.vault.open(self._rule.args)
        return msgspec.msgpack.decode(opened, type=dict[str, Any])

    def _logged_in(self) -> None:
        if not self.cookies and not self.storage:
            login = self._rule.login or self._rule.login_task
            raise SessionError(
                f"the login of session {self.name!r}, {login}, left no cookie and no storage: it "
                "has not logged in"
            )
        self._login_ns = time.time_ns()
        self._kept = b""  # to be saved in any case, with the time of the login


def open_session(
    channel: "RequestChannel", lease: Lease, ctx: Context, name: str | None
) -> Session:
    """Return the session of a task; UnusableSession says why there is none."""
    if name is None:
        name = lease.session
    if not name or name != lease.session:
        raise UnusableSession(
            f"ctx.session({shown_whole(name)}): this task was submitted with session = "
            f"{lease.session!r}; submit it with session = {shown_whole(name or 'NAME')}, so that "
            "one task at a time uses the session"
        )
    access = settings().sessions
    rule = access.rules.get(name)
    if rule is None:
        raise UnusableSession(
            f"there is no session {name!r} for pool {channel.worker.pool!r}: add [sessions.{name}] "
            f"to the configuration, and {name!r} to the pool's key sessions"
        )
    _key(name)  # first: without one nothing could be kept, and each task would log in anew
    return Session(channel, lease, rule, ctx)


def twice(call: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """Return the handler of a task with a session: called once more if it finds itself logged out.

    The second call logs in where it enters the session.
    """

    @functools.wraps(call)
    def plain(ctx: Context, **arguments: Any) -> Any:
        try:
            return call(ctx, **arguments)
        except LoggedOut:
            if not ctx.may_log_in_again():
                raise
        try:
            return call(ctx, **arguments)
        except LoggedOut:
            ctx.may_log_in_again()  # not any more
            raise

    @functools.wraps(call)
    async def awaited(ctx: Context, **arguments: Any) -> Any:
        try:
            return await call(ctx, **arguments)
        except LoggedOut:
            if not ctx.may_log_in_again():
                raise
        try:
            return await call(ctx, **arguments)
        except LoggedOut:
            ctx.may_log_in_again()  # not any more
            raise

    return awaited if is_async else plain


def _key(name: str) -> bytes:
    access = settings().sessions
    if not access.key:
        raise UnusableSession(f"session {name!r} has no key: {access.problem}")
    try:
        sealing.check_library()
    except SessionError as error:
        raise UnusableSession(str(error)) from None
    return access.key


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:  # a handler may write anything
        return ""


def _is_of(host: str, sites: tuple[str, ...]) -> bool:
    name = host.lower()
    return not sites or any(name == site or name.endswith(f".{site}") for site in sites)


def _check(answer: StateAnswer) -> StateAnswer:
    if answer.error:
        raise SessionError(f"the session cannot be kept or loaded: {answer.error}")
    return answer
