"""Misbehave at a control socket: `control_attacker.py SOCKET KIND SECONDS SEED`.

The program prints "begun" when it starts, ends after SECONDS or when its attack is complete, and
prints how much it did."""

import contextlib
import json
import random
import socket
import sys
import threading
import time

HALF = b'{"jsonrpc": "2.0", "id": 1, "method": "sta'
STATUS = b'{"jsonrpc": "2.0", "id": 1, "method": "status"}\n'
LINES = 1_000_000
LINES_SECONDS = 200.0  # the daemon needs about 20 seconds of processor time for them
CONNECTIONS = 500
CHANGES_MAX = 5  # bytes of a valid line that are changed


class Attacker:
    def __init__(self, path: str, seconds: float, seed: int) -> None:
        self._path = path
        self._end = time.monotonic() + seconds
        self._random = random.Random(seed)
        self.count = 0

    def _time_left(self) -> bool:
        return time.monotonic() < self._end

    def _connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(1.0)
        client.connect(self._path)
        return client

    def _send(self, data: bytes) -> None:
        """Send the data; read an answer that comes soon."""
        with contextlib.suppress(OSError), self._connect() as client:
            client.settimeout(0.05)
            client.sendall(data)
            self.count += 1
            client.recv(65536)

    def bytes(self) -> None:
        """Send random bytes, and valid lines with a few wrong bytes."""
        good = [
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
            for method, params in (
                ("status", {"names": ["jobs"]}),
                ("scale", {"pool": "nosuch", "size": 1}),
                ("tasks.list", {"limit": 5}),
                ("events", {"follow": True}),
                ("tail", {"lines": 3}),
            )
        ]
        while self._time_left():
            if self._random.random() < 0.5:
                data = self._random.randbytes(self._random.randrange(1, 5000))
            else:
                line = bytearray(self._random.choice(good) + b"\n")
                for _ in range(self._random.randrange(1, CHANGES_MAX)):
                    line[self._random.randrange(len(line))] = self._random.randrange(256)
                data = bytes(line)
            self._send(data)

    def halves(self) -> None:
        """Send lines that never end."""
        with contextlib.ExitStack() as opened:
            while self._time_left():
                with contextlib.suppress(OSError):
                    client = opened.enter_context(self._connect())
                    client.sendall(HALF)
                    self.count += 1
                time.sleep(0.01)

    def lines(self) -> None:
        """Send a great many lines over one connection, all of which are answered."""
        with self._connect() as client:
            client.settimeout(LINES_SECONDS)
            reader = threading.Thread(target=self._count_answers, args=(client,))
            reader.start()
            try:
                client.sendall(b"x\n" * LINES)
                client.shutdown(socket.SHUT_WR)
            finally:
                reader.join()

    def _count_answers(self, client: socket.socket) -> None:
        while data := client.recv(1 << 20):
            self.count += data.count(b"\n")

    def slow(self) -> None:
        """Send requests and never read the answers."""
        with contextlib.ExitStack() as opened:
            clients: list[socket.socket] = []
            while self._time_left():
                if len(clients) < 50:
                    with contextlib.suppress(OSError):
                        clients.append(opened.enter_context(self._connect()))
                        clients[-1].setblocking(False)
                for client in clients:
                    with contextlib.suppress(OSError):
                        self.count += client.send(STATUS * 100)
                time.sleep(0.01)

    def crowd(self) -> None:
        """Open five hundred silent connections, and replace those that are closed."""
        clients: list[socket.socket] = []
        while self._time_left():
            with contextlib.suppress(OSError):
                clients.append(self._connect())
                self.count += 1
            if len(clients) > CONNECTIONS:
                clients.pop(0).close()
            time.sleep(0.001)
        for client in clients:
            client.close()


def main() -> None:
    path, kind, seconds, seed = sys.argv[1:]
    attacker = Attacker(path, float(seconds), int(seed))
    print("begun", flush=True)
    getattr(attacker, kind)()
    print(attacker.count, flush=True)


if __name__ == "__main__":
    main()
