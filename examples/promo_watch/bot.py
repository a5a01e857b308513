"""A console in place of a Telegram bot: it hears every line and never waits for a website.

A line is a name of what is watched (check it now), `all`, `/watch URL`, `/unwatch NAME` or `quit`.
The bot keeps nothing itself: what is watched, and what was seen, is the daemon's.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import re
import sys
import time
from typing import Any

from musterd import (
    AsyncClient,
    MusterdError,
    StillRunning,
    TaskCancelled,
    TaskFailed,
    UnknownSchedule,
)

BEAT_SECONDS = 0.02
WHY = {
    "SiteTimeout": "it does not answer",
    "BreakerOpen": "it was silent too often, and is left alone for a while",
}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def name_of(url: str) -> str:
    """Return the name of the schedule that watches an address: one for each, always the same."""
    words = re.sub(r"[^a-z0-9]+", "-", re.sub("^https?://", "", url.lower())).strip("-")
    return f"watch-{words[:27]}-{hashlib.sha256(url.encode()).hexdigest()[:6]}"


class Bot:
    def __init__(self, musterd: AsyncClient) -> None:
        self.musterd = musterd
        self.longest_pause = 0.0

    async def run(self, lines: "asyncio.Queue[str]") -> None:
        """Answer lines until `quit`, and all that were there before it."""
        async with asyncio.TaskGroup() as background:
            endless = [background.create_task(each) for each in (self.announce(), self.measure())]
            async with asyncio.TaskGroup() as answers:
                while (line := await lines.get()) != "quit":
                    answers.create_task(self.answer(*line.split(maxsplit=1)))
            for each in endless:
                each.cancel()
        say(f"bye; the bot was never deaf for longer than {self.longest_pause * 1000:.0f} ms")

    async def answer(self, command: str = "", what: str = "") -> None:
        schedules = self.musterd.schedules
        try:
            if command == "/watch" and re.match("https?://", what):
                name = name_of(what)
                looking = {"url": what, "select": {"promo": ".promo"}}
                await schedules.put(
                    name, task="parser.extract", args=looking, every="2s", notify="task.changed"
                )
                say(f"{what} is watched as {name}")
                await self.check(name)
            elif command == "/unwatch" and what:
                await schedules.delete(what)
                say(f"{what} is not watched any more")
            elif command == "all":
                names = [each.name for each in await schedules.list()]
                await asyncio.gather(*(self.answer(name) for name in names))
            else:
                await self.check(command)
        except UnknownSchedule:
            names = [each.name for each in await schedules.list()]
            say(f"{what or command}? There are {', '.join(names)}, all, /watch URL, /unwatch NAME")
        except MusterdError as error:  # a full queue, or a schedule of the file
            say(f"{command} {what}".strip() + f": {error}")

    async def check(self, name: str) -> None:
        """Look at a site for a person who waits."""
        began = time.monotonic()
        try:
            found = await self.look(name)
        except TaskFailed as error:
            say(f"{name}: nothing to see: {WHY.get(error.type.rpartition('.')[2], error)}")
        else:
            values = ", ".join(f"{value!r}" for value in found.values())
            say(f"{name}: {values}, after {time.monotonic() - began:.2f} s")

    async def look(self, name: str) -> dict[str, Any]:
        """Run a schedule now, or join the run that is under way."""
        while True:
            try:
                run = await self.musterd.schedules.run(name)
            except StillRunning as error:
                run = await self.musterd.task(error.task)
            say(f"{name}: asking")
            with contextlib.suppress(TaskCancelled):  # it failed, and gave way to the next run
                return dict(await run.result())

    async def announce(self) -> None:
        """Announce the changes that the schedules find."""
        async for change in self.musterd.changes():
            say(f"news of {change.schedule}: {change.summary}")

    async def measure(self) -> None:
        """Measure how long the event loop was busy at once and could hear nobody."""
        while True:
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self.longest_pause = max(self.longest_pause, time.monotonic() - due)


def read_lines(lines: "asyncio.Queue[str]") -> None:
    """Read what was typed; the end of the input counts as `quit`."""
    for line in os.read(sys.stdin.fileno(), 4096).decode().splitlines() or ["quit"]:
        lines.put_nowait(line.strip())


async def main() -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_lines, lines)
    say("type all, the name of an exchange, /watch URL, /unwatch NAME or quit")
    async with AsyncClient(connect_timeout=math.inf) as musterd:  # may start before the daemon
        await Bot(musterd).run(lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
