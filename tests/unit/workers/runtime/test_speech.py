"""What a worker says within an attempt names its task."""

import asyncio
import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from musterd.ipc.wire.spoken import Spoken, unmarked
from musterd.workers.runtime.speech import Formatter, Voice, find_voice, speaking
from musterd.workers.toolkit import executors, timeout


@pytest.fixture
def voice() -> Voice:
    return Voice(io.BytesIO(), "utf-8", "backslashreplace", line_buffering=True)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    token = speaking.set("")
    yield
    speaking.reset(token)


def heard(voice: Voice) -> list[Spoken]:
    voice.flush()
    buffer = voice.buffer
    assert isinstance(buffer, io.BytesIO)
    return [unmarked(line) for line in buffer.getvalue().split(b"\n")[:-1]]


def test_lines_of_an_attempt_are_marked(voice: Voice) -> None:
    print("before", file=voice)
    speaking.set("t1")
    print("one", 2, file=voice)
    print("three\n\nfour", file=voice)
    print("fi", end="", file=voice)
    print("ve", file=voice)
    assert voice.write("six\n") == 4
    assert voice.write("") == 0
    speaking.set("")
    print("after", file=voice)
    lines = ["one 2", "three", "", "four", "five", "six"]
    said = [Spoken(line.encode(), "t1") for line in lines]
    assert heard(voice) == [Spoken(b"before"), *said, Spoken(b"after")]


def test_a_line_belongs_to_the_task_that_began_it(voice: Voice) -> None:
    print("begun ", end="", file=voice)
    speaking.set("t1")
    print("ended", file=voice)
    assert heard(voice) == [Spoken(b"begun ended")]


def logger_on(voice: Voice, **options: Any) -> logging.Logger:
    handler = logging.StreamHandler(voice)
    handler.setFormatter(Formatter(marks=True, **options))
    logger = logging.Logger("shop.prices")
    logger.addHandler(handler)
    return logger


def test_records_of_any_logger_name_the_task_and_their_level(voice: Voice) -> None:
    logger = logger_on(voice)
    logger.info("at the start")
    speaking.set("t1")
    logger.warning("odd")
    assert heard(voice) == [
        Spoken(b"INFO shop.prices [-] at the start", "", "INFO"),
        Spoken(b"WARNING shop.prices [t1] odd", "t1", "WARNING"),
    ]


def test_all_lines_of_a_record_have_its_level(voice: Voice) -> None:
    speaking.set("t1")
    try:
        raise KeyError("price")
    except KeyError:
        logger_on(voice).exception("no price")
    lines = heard(voice)
    assert lines[0].line == b"ERROR shop.prices [t1] no price"
    assert lines[-1].line == b"KeyError: 'price'"
    assert {(each.task, each.level) for each in lines} == {("t1", "ERROR")}


def test_a_record_that_names_a_task_itself_keeps_it(voice: Voice) -> None:
    speaking.set("t1")
    logger_on(voice).info("of another", extra={"MUSTERD_TASK": "t2"})
    assert heard(voice) == [Spoken(b"INFO shop.prices [t2] of another", "t2", "INFO")]


def test_a_stream_that_is_no_voice_gets_no_marks() -> None:
    record = logging.LogRecord("shop", logging.INFO, "", 0, "hello", (), None)
    speaking.set("t1")
    assert Formatter(marks=False).format(record) == "INFO shop [t1] hello"


def test_coroutines_threads_and_executors_say_it_for_their_task(voice: Voice) -> None:
    async def attempt(task: str) -> None:
        speaking.set(task)
        await asyncio.sleep(0)
        print("in a coroutine", file=voice)
        await asyncio.to_thread(print, "in a thread", file=voice)
        await asyncio.get_running_loop().run_in_executor(
            executors.io, lambda: print("in an executor", file=voice)
        )
        timeout(5)(lambda: print("in time", file=voice))()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for task in ("t1", "t2"):
                group.create_task(attempt(task))

    asyncio.run(main())
    speaking.set("t3")
    other = threading.Thread(target=print, args=("on its own",), kwargs={"file": voice})
    other.start()
    other.join()
    executors.shutdown()
    places = (b"in a coroutine", b"in a thread", b"in an executor", b"in time")
    expected = [Spoken(place, task) for place in places for task in ("t1", "t2")]
    assert sorted(heard(voice)) == sorted([*expected, Spoken(b"on its own")])


def test_the_streams_of_a_process_become_voices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, "utf-8", "surrogateescape", write_through=True)
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, stream)
    replaced = io.StringIO()  # as pytest's and redirect_stdout()'s
    monkeypatch.setattr(sys, "stderr", replaced)
    find_voice()
    found: Any = sys.stdout
    assert type(found) is Voice
    assert (found.encoding, found.errors) == ("utf-8", "surrogateescape")
    assert (found.line_buffering, found.write_through) == (False, True)
    assert found.buffer is buffer
    assert sys.stderr is replaced
    find_voice()
    assert sys.stdout is found
