"""A console in place of a Telegram bot: it hears every button and never waits for a website.

    python bot.py [musterd.toml]

A line is a button: the name of an exchange, `all`, or `quit`.
"""

import asyncio
import contextlib
import math
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from musterd import AsyncClient, MusterdError, TaskFailed

BEAT_SECONDS = 0.02
WHY = {
    "timeout": "it does not answer",
    "open": "it was silent too often, and is left alone for a while",
}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Bot:
    def __init__(self, musterd: AsyncClient, watched: dict[str, dict[str, Any]]) -> None:
        self.musterd = musterd
        self.watched = watched  # the schedules of musterd.toml, by name
        self.longest_pause = 0.0

    async def run(self, buttons: "asyncio.Queue[str]") -> None:
        """Handle buttons until `quit`; answer everything asked before."""
        async with asyncio.TaskGroup() as background:
            endless = [background.create_task(each) for each in (self.announce(), self.measure())]
            async with asyncio.TaskGroup() as answers:
                while (button := await buttons.get()) != "quit":
                    for name in self.watched if button == "all" else [button]:
                        answers.create_task(self.check(name))
            for each in endless:
                each.cancel()
        say(f"bye; the bot was never deaf for longer than {self.longest_pause * 1000:.0f} ms")

    async def check(self, name: str) -> None:
        """Check an exchange for a person who waits: the task goes before all scheduled ones."""
        if name not in self.watched:
            say(f"{name}? There are {', '.join(self.watched)}, all and quit")
            return
        began = time.monotonic()
        schedule = self.watched[name]
        task = await self.musterd.submit(
            schedule["task"], schedule["args"], priority="high", on_open="fail", debounce=0.5
        )
        try:
            async for progress in task.progress():
                say(f"{name}: {progress.fraction:.0%} {progress.text}")
            found = await task.result()
        except TaskFailed as error:
            say(f"{name}: no promo: {WHY.get(error.kind, error)}")
        except MusterdError as error:  # for example a full queue
            say(f"{name}: try again later: {error}")
        else:
            say(f"{name}: {found['promo']!r}, after {time.monotonic() - began:.2f} s")

    async def announce(self) -> None:
        """Announce the changes that the schedules find."""
        async for change in self.musterd.changes():
            found = await change.task.result()
            say(f"promo changed: {change.schedule}: {found['before']!r} -> {found['promo']!r}")

    async def measure(self) -> None:
        """Measure how long the event loop was busy at once and could hear no button."""
        while True:
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self.longest_pause = max(self.longest_pause, time.monotonic() - due)


def read_buttons(buttons: "asyncio.Queue[str]") -> None:
    """Read what was typed; the end of the input counts as `quit`."""
    for line in os.read(sys.stdin.fileno(), 4096).decode().splitlines() or ["quit"]:
        buttons.put_nowait(line.strip())


async def main(config: Path) -> None:
    watched = {each["name"]: each for each in tomllib.loads(config.read_text())["schedule"]}
    buttons: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_buttons, buttons)
    say(f"press a button: {', '.join(watched)}, all or quit")
    async with AsyncClient(connect_timeout=math.inf) as musterd:  # may start before the daemon
        await Bot(musterd, watched).run(buttons)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(Path(*sys.argv[1:2] or ["musterd.toml"])))
