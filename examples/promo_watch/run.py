"""Start the exchanges, the daemon and the bot with one command, and end them all.

python run.py           you type
python run.py --demo    the program types, and breaks things meanwhile
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
from bot import name_of
from sites import PASSWORD, PORT

from musterd.supervisor.system.commands import typed

HERE = Path(__file__).resolve().parent
MUSTERD, MUSTERCTL = "musterd.supervisor", "musterd.supervisor.ctl"
PATIENCE_SECONDS = 60.0  # for one step of the demo, on a very busy machine
RESTART_SECONDS = 0.5  # what RestartSec= is to systemd
POLL_SECONDS = 0.1


def tell(text: str) -> None:
    print(f"\n--- {text}", flush=True)


async def python(*arguments: str, **options: Any) -> Process:
    """Start a Python program where vault.py is found."""
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=HERE, **options)


@contextlib.asynccontextmanager
async def ended(process: Process) -> AsyncIterator[Process]:
    """Yield a process that is told to end, and has ended, after the block."""
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


class Show:
    """The daemon and the programs that speak to it, in a temporary directory."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.site = f"http://127.0.0.1:{port}"
        self.config = folder / "musterd.toml"
        self.log = folder / "musterd.log"
        self.control = folder / "run" / "control.sock"
        self.daemon: Process | None = None
        self.dashboard = free_address() if find_spec("uvicorn") else ""  # over restarts
        config = (HERE / "musterd.toml").read_text()
        self.config.write_text(config.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{port}"))

    async def keep_daemon(self) -> None:
        """Run the daemon, and start it again when it dies, as systemd does for a service."""
        folders = {"runtime_dir": self.control.parent, "state_dir": self.folder / "state"}
        settings = [f"--set=supervisor.{key}={path}" for key, path in folders.items()]
        if self.dashboard:
            settings.append(f"--set=http.listen={self.dashboard}")
        options = {"stdin": DEVNULL, "env": {**os.environ, "VAULT_PASSWORD": PASSWORD}}
        while True:
            with self.log.open("ab") as log:
                self.daemon = await python(
                    *("-m", MUSTERD, "run", "-c", str(self.config), *settings),
                    **{**options, "stdout": log, "stderr": log, "start_new_session": True},
                )
            async with ended(self.daemon):
                await self.daemon.wait()
            await asyncio.sleep(RESTART_SECONDS)

    @contextlib.asynccontextmanager
    async def musterd(self) -> AsyncIterator[None]:
        keeper = asyncio.create_task(self.keep_daemon())
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])
            code = self.daemon.returncode if self.daemon is not None else None
            tell(f"musterd has ended, with exit code {code}")

    async def bot(self, pipe: int | None) -> Process:
        address = {"MUSTERD_TASKS": str(self.control.with_name("tasks.sock"))}
        return await python("bot.py", env={**os.environ, **address}, stdin=pipe, stdout=pipe)

    async def ctl(self, *arguments: str) -> str:
        """Return the output of musterctl."""
        command = ("-m", MUSTERCTL, "-s", str(self.control), *arguments)
        process = await python(*command, stdout=PIPE, stderr=DEVNULL)
        return (await process.communicate())[0].decode()

    async def until(self, right: Callable[[str], bool], *arguments: str) -> str:
        """Return the output of musterctl as soon as it is right."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not right(said := await self.ctl(*arguments)):
            if time.monotonic() > give_up:
                raise SystemExit(f"musterctl {' '.join(arguments)} says in the end:\n{said}")
            await asyncio.sleep(POLL_SECONDS)
        return said

    async def tell_ways_in(self) -> None:
        """Tell how to look at the fleet, by an address and a command that work as they are."""
        if self.dashboard:
            await self.until(lambda said: '"state": "up"' in said, "--json", "status")
            print(f"dashboard: http://{self.dashboard}")
        else:
            print("dashboard: pip install 'musterd[web]'")
        print(typed("musterctl", "-s", str(self.control), "status", cwd=Path.cwd()), flush=True)


class User:
    """Types to the bot and reads what it says."""

    def __init__(self, bot: Process) -> None:
        assert bot.stdin is not None
        assert bot.stdout is not None
        self._lines, self._words = bot.stdin, bot.stdout

    async def ask(self, *lines: str, until: list[str]) -> None:
        """Type these lines; wait until the bot has said all of those words, in any order."""
        self._lines.write("".join(f"{line}\n" for line in lines).encode())
        while until:
            try:
                line = await asyncio.wait_for(self._words.readline(), PATIENCE_SECONDS)
            except TimeoutError:
                line = b""
            if not line:
                raise SystemExit(f"the bot did not say {until}")
            print(line.decode(), end="", flush=True)
            until = [each for each in until if each not in line.decode()]


async def demonstrate(show: Show, user: User) -> None:
    """Show the life of a bot in a quarter of a minute."""

    async def change(exchange: str, promo: str) -> None:
        async with aiohttp.ClientSession() as session:
            await session.post(f"{show.site}/{exchange}", data=promo)

    tell("all at once: five exchanges answer, vault to its user alone; abyss never does")
    sights = ["aurora: '", "nimbus: '", "tortoise: '", "gremlin: '", "vault: '49.00 €'"]
    await user.ask("all", until=[*sights, "abyss: nothing"])

    tell("aurora has a new promo, and vault is below 40: their schedules find it")
    await change("aurora", "free withdrawals")
    await change("vault", "39.00 €")
    await user.ask(until=["news of aurora: promo", "news of vault: price"])

    tell("another exchange is watched from now on; one of the file is not to be unwatched")
    kiosk = f"{show.site}/kiosk"
    await user.ask(f"/watch {kiosk}", until=["'a coffee with every trade'"])
    await user.ask("/unwatch aurora", until=["musterd.toml"])

    tell("abyss was silent three times: it is left alone, and nobody waits for it")
    print(await show.until(lambda said: "open" in said, "breaker"), end="")
    await user.ask("abyss", "aurora", until=["abyss: nothing", "aurora: 'free withdrawals'"])

    worker = int(await show.ctl("pid", "browser/0"))
    tell(f"kill -9 {worker}: a worker, and with it all of its browser")
    os.kill(worker, signal.SIGKILL)
    await user.ask("nimbus", until=["nimbus: '50 USDT for a friend'"])

    await user.ask("tortoise", until=["tortoise: asking"])
    assert show.daemon is not None
    tell(f"kill -9 {show.daemon.pid}: the daemon, at work; meanwhile nimbus and kiosk have news")
    show.daemon.kill()
    await change("nimbus", "100 USDT for a friend")
    await change("kiosk", "a cake with every trade")
    news = ["news of nimbus: promo", "promo a coffee with every trade → a cake"]
    await user.ask(until=["tortoise: '5 % on stakes, slowly'", *news])

    async with aiohttp.ClientSession() as session:
        page = await (await session.get(f"{show.site}/login")).text()
    logins = page.partition("logins: ")[2].partition("<")[0]
    tell(f"vault has counted {logins} login, over both deaths")
    await user.ask("vault", until=["vault: '39.00 €'"])
    await user.ask(f"/unwatch {name_of(kiosk)}", until=["not watched any more"])
    await user.ask("quit", until=["bye"])


async def run(folder: Path, *, demo: bool) -> None:
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    still = ["--still"] if demo else []
    # Ctrl-C is for the bot alone: the others have sessions of their own.
    sites = await python("sites.py", "--port=0", *still, stdout=PIPE, start_new_session=True)
    async with ended(sites):
        assert sites.stdout is not None
        show = Show(folder, int(await sites.stdout.readline()))
        async with show.musterd():
            tell(f"exchanges on {show.site}")
            await show.tell_ways_in()
            async with ended(await show.bot(PIPE if demo else None)) as bot:
                try:
                    await (demonstrate(show, User(bot)) if demo else bot.wait())
                except SystemExit:
                    print(show.log.read_text())
                    raise


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch the promos of exchanges.")
    parser.add_argument("--demo", action="store_true", help="type for me")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="promo-watch-"))
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(run(folder, demo=options.demo))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
