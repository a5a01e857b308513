"""A network for each node of the demo, so that each has a loopback and an address of its own.

    hub: 10.77.1.1 ─── 10.77.1.2 first node
         10.77.2.1 ─── 10.77.2.2 second node        the network of this machine is not touched

PostgreSQL is in the hub. A network ends with the processes in it: `cat` keeps one, and ends when
whoever started it does. This needs root, `ip`, `unshare` and `nsenter`.
"""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

PROGRAMS = ("ip", "unshare", "nsenter", "cat")
ADDRESS = "10.77.{node}.{end}"
READY_SECONDS = 10.0
LOOK_SECONDS = 0.01


class Networks:
    """Networks that are there; Unavailable otherwise."""

    def __init__(self, nodes: int) -> None:
        self._keepers: list[subprocess.Popen[bytes]] = []
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)} is not installed")
        try:
            for _ in range(nodes + 1):
                self._keepers.append(self._keep())
            self._ip(0, "link", "set", "lo", "up")
            for node in range(1, nodes + 1):
                self._join(node)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise Unavailable(_reason(error)) from None

    def hub(self, user: int, group: int) -> list[str]:
        """Return the command that starts something in the hub, as a user."""
        return [*self._enter(0), "--setuid", str(user), "--setgid", str(group), "--"]

    def node(self, number: int) -> list[str]:
        """Return the command that starts something at a node, from 1 on."""
        return [*self._enter(number), "--"]

    def hub_address(self, number: int) -> str:
        """Return the address of the hub as a node sees it."""
        return ADDRESS.format(node=number, end=1)

    def close(self) -> None:
        for keeper in self._keepers:
            assert keeper.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
        for keeper in self._keepers:
            keeper.wait()
        self._keepers.clear()

    def _keep(self) -> "subprocess.Popen[bytes]":
        own = Path("/proc/self/ns/net").readlink()
        keeper = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        deadline = time.monotonic() + READY_SECONDS
        network = Path(f"/proc/{keeper.pid}/ns/net")
        while keeper.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if network.readlink() != own:
                    return keeper
            time.sleep(LOOK_SECONDS)
        keeper.kill()
        _, said = keeper.communicate()
        raise OSError(said.decode(errors="replace").strip() or "no network was made")

    def _join(self, node: int) -> None:
        near, far = (ADDRESS.format(node=node, end=end) for end in (1, 2))
        name, pid = f"node{node}", str(self._keepers[node].pid)
        self._ip(0, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self._ip(0, "address", "add", f"{near}/24", "dev", name)
        self._ip(0, "link", "set", name, "up")
        self._ip(node, "address", "add", f"{far}/24", "dev", "eth0")
        self._ip(node, "link", "set", "eth0", "up")
        self._ip(node, "link", "set", "lo", "up")

    def _enter(self, number: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._keepers[number].pid}/ns/net"]

    def _ip(self, number: int, *words: str) -> None:
        command = [*self._enter(number), "--", "ip", *words]
        subprocess.run(command, check=True, capture_output=True, text=True)


class Unavailable(Exception):
    """This machine does not allow networks of our own."""


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip() or str(error)
    return str(error)
