"""Start the exchanges, the daemon and the bot with one command, and end them all.

python run.py           you type the buttons
python run.py --demo    the program presses them, and breaks things meanwhile
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

HERE = Path(__file__).resolve().parent
ADDRESS = "127.0.0.1:8700"  # in musterd.toml; here a free port takes its place
MUSTERD = (sys.executable, "-m", "musterd.supervisor")
MUSTERCTL = (sys.executable, "-m", "musterd.supervisor.ctl")
PATIENCE_SECONDS = 60.0  # for one step of the demo, on a very busy machine
RESTART_SECONDS = 0.5  # what RestartSec= is to systemd
POLL_SECONDS = 0.1


def tell(text: str) -> None:
    print(f"\n--- {text}", flush=True)


async def end(process: Process) -> int:
    if process.returncode is None:
        process.terminate()
    return await process.wait()


class Show:
    """Everything that runs, in a temporary directory."""

    def __init__(self, folder: Path, *, demo: bool) -> None:
        self.folder = folder
        self.demo = demo
        self.config = folder / "musterd.toml"
        self.log = folder / "musterd.log"
        self.runtime = folder / "run"
        self.daemon: Process | None = None
        self.ending = False

    @contextlib.asynccontextmanager
    async def exchanges(self) -> AsyncIterator[str]:
        """Run the exchanges; yield their address."""
        turn = ["--turn", "0"] if self.demo else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "sites.py", "--port", "0", *turn),
            cwd=HERE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C is for the bot
        )
        try:
            assert process.stdout is not None
            port = int(await process.stdout.readline())
            config = (HERE / "musterd.toml").read_text()
            self.config.write_text(config.replace(ADDRESS, f"127.0.0.1:{port}"))
            yield f"http://127.0.0.1:{port}"
        finally:
            await end(process)

    @contextlib.asynccontextmanager
    async def musterd(self) -> AsyncIterator[None]:
        """Run the daemon, and start it again when it dies, as systemd does for a service."""
        keeper = asyncio.create_task(self._keep_daemon())
        try:
            yield
        finally:
            self.ending = True
            if self.daemon is not None and self.daemon.returncode is None:
                self.daemon.terminate()
            code = await keeper
            tell(f"musterd has ended, with exit code {code}")

    async def _keep_daemon(self) -> int | None:
        while not self.ending:
            self.daemon = await self._start_daemon()
            if self.ending:
                self.daemon.terminate()
            await self.daemon.wait()
            if not self.ending:
                await asyncio.sleep(RESTART_SECONDS)
        return self.daemon.returncode if self.daemon is not None else None

    async def _start_daemon(self) -> Process:
        folders = {"runtime_dir": self.runtime, "state_dir": self.folder / "state"}
        settings = [f"--set=supervisor.{key}={path}" for key, path in folders.items()]
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(*MUSTERD, "run", "-c", str(self.config), *settings),
                cwd=HERE,  # where promos.py is
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def start_bot(self, pipe: int | None) -> Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "bot.py", str(self.config)),
            cwd=HERE,
            env={**os.environ, "MUSTERD_TASKS": str(self.runtime / "tasks.sock")},
            stdin=pipe,
            stdout=pipe,
        )

    async def ctl(self, *arguments: str) -> str:
        """Return the output of musterctl."""
        process = await asyncio.create_subprocess_exec(
            *(*MUSTERCTL, "-s", str(self.runtime / "control.sock"), *arguments),
            stdout=PIPE,
            stderr=DEVNULL,
        )
        return (await process.communicate())[0].decode()

    async def until(self, right: Callable[[str], bool], *arguments: str) -> str:
        """Return the output of musterctl as soon as it is right."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not right(said := await self.ctl(*arguments)):
            if time.monotonic() > give_up:
                raise SystemExit(f"musterctl {' '.join(arguments)} says in the end:\n{said}")
            await asyncio.sleep(POLL_SECONDS)
        return said


class User:
    """Presses the bot's buttons and reads what it says."""

    def __init__(self, bot: Process) -> None:
        assert bot.stdin is not None
        assert bot.stdout is not None
        self._buttons, self._words = bot.stdin, bot.stdout

    def press(self, *buttons: str) -> None:
        self._buttons.write("".join(f"{button}\n" for button in buttons).encode())

    async def read_until(self, *words: str) -> None:
        """Wait until the bot has said all of these, in any order."""
        awaited = list(words)
        while awaited:
            try:
                line = await asyncio.wait_for(self._words.readline(), PATIENCE_SECONDS)
            except TimeoutError:
                line = b""
            if not line:
                raise SystemExit(f"the bot did not say {awaited}")
            print(line.decode(), end="", flush=True)
            awaited = [each for each in awaited if each not in line.decode()]


def all_ready(status: str) -> bool:
    pools = json.loads(status or "{}").get("pools", [])
    states = [worker["state"] for pool in pools for worker in pool["workers"]]
    return bool(states) and all(state in ("RUNNING", "BUSY") for state in states)


def all_seen(schedules: str) -> bool:
    """Tell whether each schedule has a result for later ones to differ from; abyss never will."""
    found = json.loads(schedules)["schedules"]
    return all(each["runs"] > 1 or each["last_state"] in ("succeeded", "failed") for each in found)


async def demonstrate(show: Show, site: str) -> None:
    """Show the life of a bot in a quarter of a minute."""

    async def change(exchange: str, promo: str) -> None:
        async with aiohttp.ClientSession() as session:
            await session.post(f"{site}/{exchange}", data=promo)

    bot = await show.start_bot(PIPE)
    user = User(bot)
    try:
        await user.read_until("press a button")
        await show.until(all_ready, "--json", "status")
        tell("all buttons at once: four exchanges answer, abyss never does")
        user.press("all")
        await user.read_until(
            "aurora: '", "nimbus: '", "tortoise: '", "gremlin: '", "abyss: no promo"
        )

        await show.until(all_seen, "--json", "schedule")
        tell("aurora has a new promo, and its schedule finds it")
        await change("aurora", "free withdrawals")
        await user.read_until("promo changed: aurora: 'no fees in November' -> 'free withdrawals'")

        tell("abyss was silent three times: it is left alone, and nobody waits for it")
        print(await show.until(lambda said: "open" in said, "breaker"), end="")
        user.press("abyss", "aurora")
        await user.read_until("abyss: no promo", "aurora: 'free withdrawals'")

        worker = int(await show.ctl("pid", "browser/0"))
        tell(f"kill -9 {worker}: a worker, and with it all of its browser")
        os.kill(worker, signal.SIGKILL)
        user.press("nimbus")
        await user.read_until("nimbus: '50 USDT for a friend'")

        user.press("tortoise")
        await user.read_until("tortoise: 10%")
        assert show.daemon is not None
        tell(f"kill -9 {show.daemon.pid}: the daemon, at work; meanwhile nimbus has a new promo")
        show.daemon.kill()
        await change("nimbus", "100 USDT for a friend")
        await user.read_until(
            "tortoise: '5 % on stakes, slowly'",
            "promo changed: nimbus: '50 USDT for a friend' -> '100 USDT for a friend'",
        )
        user.press("quit")
        await user.read_until("bye")
    except SystemExit:
        print(show.log.read_text())
        raise
    finally:
        await end(bot)


async def run(folder: Path, *, demo: bool) -> None:
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    show = Show(folder, demo=demo)
    async with show.exchanges() as site, show.musterd():
        tell(f"exchanges on {site}; musterctl -s {show.runtime}/control.sock status")
        if demo:
            await demonstrate(show, site)
            return
        bot = await show.start_bot(None)
        try:
            await bot.wait()
        finally:
            await end(bot)


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch the promos of five exchanges.")
    parser.add_argument("--demo", action="store_true", help="press the buttons for me")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="promo-watch-"))
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(run(folder, demo=options.demo))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
