"""The web process's end of control.sock: equal requests are sent once.

One connection is opened when it is needed and kept. An answer is fresh for FRESH_SECONDS; callers
with a request that is under way wait for its answer. However many pages are open, the daemon gets
each request about twice a second at most, and none while it does not answer. Answers are forgotten
with their connection.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from msgspec import Raw, Struct, UnsetType

from musterd.ipc.errors import MusterdError
from musterd.supervisor.api.envelope import decode_answer, encode_request
from musterd.supervisor.api.rpc import ANSWER_BYTES_MAX, Params, RpcError

ANSWER_SECONDS = 2.0  # a supervisor that needs longer is unhealthy
FRESH_SECONDS = 0.5
# Shorter, so that a health check repeated every second is never answered from the cache.
CHECK_FRESH_SECONDS = 0.1
ANSWERS_KEPT = 32  # of different requests: lists of tasks have many filters
ACT_SECONDS = 10.0  # for a commit on a slow disk; no action waits for more


class NoAnswer(MusterdError):
    """The daemon is not there, or did not answer in time."""


class _Answer(Struct, frozen=True):
    at: float
    result: Raw


class Feed:
    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = 0
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._answers: dict[bytes, _Answer] = {}  # by question
        self._asked: dict[bytes, asyncio.Future[Raw]] = {}
        self.questions = 0  # requests sent to the daemon
        self.failures = 0  # requests not answered in time

    async def ask(self, params: Params, fresh_seconds: float = FRESH_SECONDS) -> Raw:
        """Return a result as JSON that is fresh enough; NoAnswer, or RpcError if refused."""
        question = encode_request(0, params)
        known = self._answers.get(question)
        if known is not None and time.monotonic() - known.at < fresh_seconds:
            return known.result
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                asked = self._asked.get(question) or await self._put(question, params)
                return await asyncio.shield(asked)
        except TimeoutError:
            self.failures += 1
            raise NoAnswer(
                f"the supervisor did not answer within {ANSWER_SECONDS:g} s: it is stopped or its "
                "loop hangs: see its log"
            ) from None
        except NoAnswer:
            self.failures += 1
            raise

    async def act(self, params: Params) -> Raw:
        """Have something done, or read what only one page needs. Raises what ask() raises."""
        try:
            async with asyncio.timeout(ACT_SECONDS):
                async with self._connecting:
                    answer = await self._send(params)
                return await asyncio.shield(answer)
        except TimeoutError:
            raise NoAnswer(
                f"the supervisor did not answer within {ACT_SECONDS:g} s: the action may still "
                "take effect: check again"
            ) from None

    def forget(self) -> None:
        """Forget answers: something was done, and they tell of the time before."""
        self._answers.clear()

    async def _put(self, question: bytes, params: Params) -> "asyncio.Future[Raw]":
        async with self._connecting:
            asked = self._asked.get(question)
            if asked is not None:  # meanwhile
                return asked
            asked = await self._send(params)
            self._asked[question] = asked
            asked.add_done_callback(lambda done: self._answered(question, done))
            return asked

    async def _send(self, params: Params) -> "asyncio.Future[Raw]":
        if self._link is None or self._link.closed:
            self._link = await _connect(self._path, self._answers.clear)
        self._numbers += 1
        self.questions += 1
        return self._link.send(self._numbers, params)

    def _answered(self, question: bytes, done: "asyncio.Future[Raw]") -> None:
        del self._asked[question]
        if not done.cancelled() and done.exception() is None:
            self._answers.pop(question, None)
            self._answers[question] = _Answer(time.monotonic(), done.result())
            if len(self._answers) > ANSWERS_KEPT:
                del self._answers[next(iter(self._answers))]

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()


class _Link:
    """A connection, and the futures that wait for its answers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_closed: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_closed = on_closed
        self._waiting: dict[int, asyncio.Future[Raw]] = {}
        self._reading = asyncio.create_task(self._read())
        self.closed = False

    def send(self, number: int, params: Params) -> "asyncio.Future[Raw]":
        answer: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._writer.write(encode_request(number, params))
        return answer

    async def _read(self) -> None:
        problem: MusterdError = NoAnswer("the supervisor closed the connection: it has ended")
        try:
            while line := await self._reader.readline():
                answer = decode_answer(line)
                waiting = self._waiting.pop(answer.id, None) if isinstance(answer.id, int) else None
                if not isinstance(answer.error, UnsetType):
                    refused = RpcError(answer.error.code, answer.error.message)
                    if waiting is None:  # sent on connection: we are refused
                        problem = refused
                    else:
                        _fail(waiting, refused)
                elif waiting is not None and not isinstance(answer.result, UnsetType):
                    waiting.set_result(answer.result)
        except (OSError, ValueError, RpcError) as error:  # ValueError: longer than the limit
            problem = NoAnswer(f"cannot read the supervisor's answer: {error}")
        finally:
            self.closed = True
            self._on_closed()
            self._writer.close()
            for waiting in self._waiting.values():
                _fail(waiting, problem)
            self._waiting.clear()

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


def _fail(waiting: "asyncio.Future[Raw]", problem: MusterdError) -> None:
    if not waiting.done():
        waiting.set_exception(problem)
        waiting.exception()  # marks it as retrieved: its waiter may have left


async def _connect(path: str, on_closed: Callable[[], None]) -> _Link:
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=ANSWER_BYTES_MAX)
    except OSError as error:
        why = error.strerror or str(error)
        raise NoAnswer(f"cannot reach the supervisor at {path}: {why}") from error
    return _Link(reader, writer, on_closed)
