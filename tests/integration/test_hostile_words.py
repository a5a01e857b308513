"""Whatever a handler says, its worker survives and the attempt ends: every value in every place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_standin import Fleet

from musterd.ipc.wire.messages import (
    Done,
    LoadState,
    LockAnswer,
    LockState,
    Progress,
    SaveState,
    StateAnswer,
    Stop,
)

HOSTILE = """
    import dataclasses, decimal, enum, fractions, math, os, sys
    from pathlib import Path
    from musterd import Permanent, Retry, Worker, task

    class Text(str):
        def __getitem__(self, key): raise RuntimeError("no part of me")
        def encode(self, *args): raise RuntimeError("no bytes of me")
        def __str__(self): return self
    class Mute:
        def __str__(self): raise SystemExit("no word")
        def __repr__(self): raise KeyboardInterrupt
        def __float__(self): raise MemoryError
        def __format__(self, spec): raise ZeroDivisionError
    class Liar(float):
        def __lt__(self, other): return True
        __le__ = __gt__ = __ge__ = __lt__
    class Colour(enum.Enum):
        RED = "\\ud83d"
    loop = []
    loop.append(loop)
    deep = []
    for _ in range(100_000): deep = [deep]

    VALUES = [
        "\\ud83d", "a" * 490 + "\\udfff" * 20, "",
        "\\x00\\x1b[2J\\r\\n\\u2028", Text("sub\\ud800class"),
        "x" * 10_000_000, b"\\xff\\xfe", None, True, 0, 1, 0.5, -1, 2**63, 2**64, 10**400, -10**400,
        math.nan, math.inf, -math.inf, Liar("nan"), Liar(7), decimal.Decimal("0.5"),
        decimal.Decimal("sNaN"), fractions.Fraction(1, 3), 1j, object(), Mute(), Mute, loop, deep,
        {"\\ud83d": 1}, {Mute(): 1}, {1: 2}, [Mute()], Colour.RED, Path("\\udcff"), lambda: None,
        sys, Exception("\\ud83d"), range(3), memoryview(b"x"), (x for x in ()), ...,
    ]

    class Frozen(Exception):
        def __setattr__(self, name, value): raise AttributeError(name)
    class Faceless(Exception):
        __class__ = property(lambda self: 1 / 0)
    class Endless(Exception):
        @property
        def __cause__(self): raise SystemExit
        @property
        def retry_after(self): raise KeyboardInterrupt
        @property
        def response(self): return Mute()
    class Named(Exception): ...
    Named.__qualname__, Named.__module__ = "N\\ud83d", "\\udc00" * 500

    def raise_with(name):
        def raising(ctx, value):
            error = RuntimeError("see the attribute")
            setattr(error, name, value)
            raise error
        return raising

    def raise_(kind):
        def raising(ctx, value): raise kind(value)
        return raising

    def ring(ctx, value):
        error = ValueError(value)
        error.__context__ = other = KeyError(value)
        other.__context__ = error
        raise error

    def group(ctx, value):
        raise BaseExceptionGroup("\\ud83d", [SystemExit(value), ValueError(value)])

    def noted(ctx, value):
        error = ValueError("with notes")
        error.__notes__ = [value]
        raise error

    def locked(ctx, value):
        with ctx.lock(value): ...
    def patient(ctx, value):
        with ctx.lock("l", timeout=value): ...

    WAYS = {
        "progress": lambda ctx, value: ctx.progress(0.5, value),
        "fraction": lambda ctx, value: ctx.progress(value, "x"),
        "label": lambda ctx, value: ctx.metrics.counter("seen", site=value).inc(),
        "metric": lambda ctx, value: ctx.metrics.counter(value).inc(),
        "count": lambda ctx, value: ctx.metrics.counter("seen").inc(value),
        "gauge": lambda ctx, value: ctx.metrics.gauge("level").set(value),
        "log": lambda ctx, value: ctx.log.warning("%s", value),
        "message": lambda ctx, value: ctx.log.warning(value),
        "save": lambda ctx, value: ctx.state.save(value),
        "save_as": lambda ctx, value: ctx.state.save(1, key=value),
        "save_for": lambda ctx, value: ctx.state.save(1, ttl=value),
        "load": lambda ctx, value: ctx.state.load(key=value),
        "clear": lambda ctx, value: ctx.state.clear(key=value),
        "lock": locked,
        "patient": patient,
        "return": lambda ctx, value: value,
        "raise": raise_(ValueError),
        "exit": raise_(SystemExit),
        "permanent": raise_(Permanent),
        "retry": lambda ctx, value: raise_(lambda after: Retry("later", after=after))(ctx, value),
        "frozen": raise_(Frozen),
        "faceless": raise_(Faceless),
        "endless": raise_(Endless),
        "named": raise_(Named),
        "ring": ring,
        "group": group,
        "noted": noted,
        "retry_after": raise_with("retry_after"),
        "status": raise_with("status"),
        "unwell": raise_with("unwell"),
        "print": lambda ctx, value: print(value),
    }

    BLOCKING = ("save", "save_as", "save_for", "load", "clear", "lock", "patient")

    def odd_pause(attempt, error): return VALUES[attempt]
    def odd_hook(ctx, error): raise Faceless(Mute())

    class Hostile(Worker):
        @task
        def count(self, ctx): return len(VALUES)
        @task
        def ways(self, ctx): return list(WAYS)
        @task
        def say(self, ctx, way: str, value: int): return WAYS[way](ctx, VALUES[value])
        @task
        async def asay(self, ctx, way: str, value: int):
            return None if way in BLOCKING else WAYS[way](ctx, VALUES[value])
        @task(backoff=odd_pause, on_retry=odd_hook)
        def again(self, ctx): raise Faceless("once more")
        @task
        def texts(self, ctx, codes: list[int]):
            text = "".join(map(chr, codes))
            ctx.progress(0.5, text)
            ctx.metrics.counter("said", word=text).inc()
            ctx.log.info("%s", text)
            raise ValueError(text)
        @task
        def close_streams(self, ctx):
            sys.stdout.close()
            sys.stdout = None
        @task
        async def sever(self, ctx):
            import gc
            from musterd.workers.runtime.mailbox import Mailbox
            for each in gc.get_objects():
                if type(each) is Mailbox: each.sever()
        @task
        def still_there(self, ctx): return os.getpid()
"""


class Talk(Fleet):
    """Answers every request; remembers the messages that are no results."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"hostile": HOSTILE})
        self.said: list[Progress] = []
        self.counted: list[Any] = []

    def receive(self) -> Any:
        while True:
            message = super().receive()
            match message:
                case LoadState() | SaveState():
                    self.send(StateAnswer(message.request))
                case LockState(take=True):
                    self.send(LockAnswer(message.request, True))
                case LockState():
                    pass
                case Progress():
                    self.said.append(message)
                case Done():
                    self.counted += message.samples
                    return message
                case _:
                    return message


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    talk = Talk(tmp_path)
    yield talk
    talk.close()


@pytest.mark.parametrize("method", ["say", "asay"])
def test_no_value_in_no_place_ends_the_worker(talk: Talk, method: str) -> None:
    talk.start("hostile:Hostile")
    pid, values = talk.value("still_there"), range(talk.value("count"))
    for way in talk.value("ways"):
        talk.assign(*[talk.lease(method, {"way": way, "value": value}) for value in values])
        assert len(talk.completions(len(values))) == len(values), way
        assert talk.value("still_there") == pid, f"{way}: {talk.errors.read_text()}"
    talk.send(Stop())
    assert talk.exit_code() == 0, talk.errors.read_text()


def test_a_worker_that_can_say_nothing_any_more_ends(talk: Talk) -> None:
    talk.start("hostile:Hostile")
    talk.assign(talk.lease("sever"), talk.lease("still_there"))
    assert talk.exit_code() == 1


def test_half_an_emoji_is_written_out(talk: Talk) -> None:
    talk.start("hostile:Hostile")
    talk.run("say", {"way": "progress", "value": 0})
    assert [each.text for each in talk.said] == ["\\ud83d"]
    talk.run("say", {"way": "label", "value": 0})
    assert [each.labels for each in talk.counted] == [{"site": "\\ud83d"}]
    failure = talk.failure("say", {"way": "raise", "value": 0})
    assert failure.message == "\\ud83d"


def test_hooks_of_a_retry_may_say_anything(talk: Talk) -> None:
    talk.start("hostile:Hostile")
    for attempt in range(talk.value("count")):
        assert talk.failure("again", attempt=attempt).message
    assert talk.value("still_there")


def test_a_handler_that_closes_the_streams_does_not_fail_the_end(talk: Talk) -> None:
    talk.start("hostile:Hostile")
    assert talk.value("close_streams") is None
    talk.send(Stop())
    assert talk.exit_code() == 0


def test_any_text_at_all_is_told(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.start("hostile:Hostile")

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.text(st.characters(blacklist_categories=()), max_size=700))
    def check(text: str) -> None:
        before = len(talk.said)
        failure = talk.failure("texts", {"codes": [ord(each) for each in text]})
        told = text.encode("utf-8", "backslashreplace").decode()
        assert failure.message == told[:2048]
        assert talk.said[before:][-1].text == told[:500]
        assert talk.counted[-1].labels == {"word": told[:64]}

    try:
        check()
    finally:
        talk.close()
