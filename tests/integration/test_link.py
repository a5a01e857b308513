"""A client's connection: it is made at once, comes back, and harms no other process."""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from musterd import AsyncClient, Client
from musterd.ipc.client import link as link_module
from musterd.ipc.client import session as session_module
from musterd.ipc.client.link import RECONNECT_NS, RECONNECT_NS_MAX, Link
from musterd.ipc.errors import NotConnected
from musterd.ipc.wire.codec import decode_client, encode
from musterd.ipc.wire.messages import (
    PROTOCOL,
    SUCCEEDED,
    Accepted,
    Hello,
    Outcome,
    Results,
    Submit,
    Watch,
    Welcome,
)
from musterd.ipc.wire.zmtp import HANDSHAKE

PATIENCE_SECONDS = 30.0
ROUTER = HANDSHAKE.replace(b"DEALER", b"ROUTER")


class Supervisor:
    """A ROUTER of libzmq in a thread, which echoes tasks and remembers them."""

    def __init__(self, path: str) -> None:
        self.peers: set[bytes] = set()  # one for each connection
        self.several = False  # send a message of several frames before each answer
        self._outcomes: dict[str, Outcome] = {}
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{path}")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._router.poll(2):
                peer, frame = self._router.recv_multipart()
                self.peers.add(peer)
                for answer in self._answers(decode_client(frame)):
                    if self.several:
                        self._router.send_multipart([peer, b"a", b"b"])
                    self._router.send_multipart([peer, encode(answer)])
        self._router.close()
        self._context.term()

    def _answers(self, message: object) -> Iterator[object]:
        match message:
            case Hello():
                yield Welcome(PROTOCOL, f"epoch-{id(self)}")
            case Submit():
                yield Accepted(message.request, [])
                for spec in message.tasks:
                    outcome = Outcome(spec.id, SUCCEEDED, spec.args, None, 1)
                    self._outcomes[spec.id] = outcome
                    yield Results([outcome])
            case Watch():
                yield Results([self._outcomes[id_] for id_ in message.ids if id_ in self._outcomes])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tasks.sock")


@pytest.fixture
def start(path: str) -> Iterator[Callable[[], Supervisor]]:
    with contextlib.ExitStack() as stack:

        def make() -> Supervisor:
            supervisor = Supervisor(path)
            stack.callback(supervisor.stop)
            return supervisor

        yield make


@contextlib.contextmanager
def listening(path: str) -> Iterator[socket.socket]:
    """Yield a bare listener; its path is free again afterwards."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        listener.bind(path)
        listener.listen(1)
        try:
            yield listener
        finally:
            os.unlink(path)


def readable(link: Link, seconds: float) -> bool:
    return bool(select.select([link.fd], [], [], seconds)[0])


def echo(client: Client, number: int = 1) -> None:
    task = client.submit("demo.echo", {"n": number})
    assert task.result(PATIENCE_SECONDS) == {"n": number}


# -- connecting -------------------------------------------------------------------------------


@pytest.fixture
def no_timers(monkeypatch):
    """Make every timer of a client longer than these tests wait."""
    for module, name in (
        (link_module, "LOOK_UP_NS"),
        (link_module, "RECONNECT_NS"),
        (session_module, "HELLO_RETRY_NS"),
        (session_module, "HELLO_SILENCE_NS"),
        (session_module, "HELLO_PERIOD_NS"),
    ):
        monkeypatch.setattr(module, name, int(10 * PATIENCE_SECONDS * 1e9))


def test_a_fresh_client_is_connected_without_a_timer(start, path, no_timers):
    supervisor = start()
    with Client(path) as client:
        client.submit("demo.echo").ack(PATIENCE_SECONDS)
        assert len(supervisor.peers) == 1
        assert client._link.connection is not None


def test_a_supervisor_that_comes_late_is_found(start, path):
    with Client(path, connect_timeout=PATIENCE_SECONDS) as client:
        task = client.submit("demo.echo", {"n": 1})
        time.sleep(0.3)
        start()
        assert task.result(PATIENCE_SECONDS) == {"n": 1}


def test_an_async_client_finds_a_late_supervisor_and_the_next_one(start, path):
    async def live() -> None:
        async with AsyncClient(path, connect_timeout=PATIENCE_SECONDS) as client:
            task = await client.submit("demo.echo", {"n": 1})
            await asyncio.sleep(0.3)
            first = start()
            assert await task.result(PATIENCE_SECONDS) == {"n": 1}
            await asyncio.to_thread(first.stop)
            task = await client.submit("demo.echo", {"n": 2})
            await asyncio.sleep(0.1)
            start()
            assert await task.result(PATIENCE_SECONDS) == {"n": 2}

    asyncio.run(live())


@pytest.mark.parametrize("stage", [0, 1, 10, 63, 64, 66, len(ROUTER) - 1, len(ROUTER)])
def test_who_goes_in_the_middle_of_the_handshake_is_forgotten_for_the_next(start, path, stage):
    with listening(path) as listener:
        client = Client(path, connect_timeout=PATIENCE_SECONDS)
        peer, _ = listener.accept()
        peer.sendall(ROUTER[:stage])
        time.sleep(0.01)
        peer.close()
    with client:
        start()
        echo(client)


def test_a_listener_that_is_no_zeromq_is_named_in_the_error(path, caplog):
    with listening(path) as listener, caplog.at_level(logging.WARNING):
        listener.listen(100)
        stop = threading.Event()

        def talk() -> None:
            listener.settimeout(0.01)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    peer, _ = listener.accept()
                    peer.sendall(b"220 mail.example.org ESMTP\r\n")
                    peer.close()

        thread = threading.Thread(target=talk)
        thread.start()
        client = Client(path, connect_timeout=0.5)
        try:
            with pytest.raises(NotConnected, match="not ZeroMQ: it began with b'220 mail"):
                client.submit("demo.echo").result()
            with pytest.raises((NotConnected, TimeoutError)):
                client.close(timeout=0.1)
        finally:
            stop.set()
            thread.join()
    assert len([r for r in caplog.records if "not ZeroMQ" in r.getMessage()]) == 1


def test_who_is_turned_away_again_and_again_comes_less_often(path):
    with listening(path) as listener:
        listener.listen(100)
        link = Link(path)
        pauses: list[int] = []
        began, turns = time.monotonic_ns(), 0
        while len(pauses) < 7:
            if select.select([listener], [], [], 0)[0]:
                listener.accept()[0].close()
                pauses.append(link._due_ns - link._tried_ns)
            readable(link, link.wait_ns(time.monotonic_ns()) / 1e9)
            link.pump()
            turns += 1
        took = time.monotonic_ns() - began
        link.close()
    assert pauses == [min(RECONNECT_NS * 2**n, RECONNECT_NS_MAX) for n in range(7)]
    assert took >= sum(pauses[:-1]), "each pause is kept"
    assert turns <= 4 * len(pauses), "and slept through"


def test_a_crowd_before_the_door_is_waited_for(path):
    """A full backlog gives EAGAIN, and no client waits in connect()."""
    with listening(path) as listener, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(10)]
        for caller in crowd:
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(path)
        link = Link(path)  # must not wait forever here
        stack.callback(link.close)
        assert link.connection is None
        assert link.wait_ns(time.monotonic_ns()) <= RECONNECT_NS
        while link.connection is None:
            listener.accept()[0].close()
            time.sleep(link.wait_ns(time.monotonic_ns()) / 1e9)
            link.pump()


# -- reconnecting -----------------------------------------------------------------------------


def test_the_descriptor_stays_the_same_and_is_quiet_while_there_is_nobody(start, path):
    first = start()
    link = Link(path)
    fd = link.fd
    assert readable(link, PATIENCE_SECONDS)
    link.pump()
    time.sleep(RECONNECT_NS_MAX / 1e9 + 0.05)  # the connection counts as lasting
    first.stop()
    while link.connection is not None:  # a dying listener may let us in once more
        assert readable(link, PATIENCE_SECONDS)
        link.pump()
    assert not readable(link, 0.05)
    start()
    end = time.monotonic() + PATIENCE_SECONDS
    while link.session.epoch == "" and time.monotonic() < end:
        readable(link, link.wait_ns(time.monotonic_ns()) / 1e9)
        link.pump()
    assert (link.fd, bool(link.session.epoch)) == (fd, True)
    link.close()


def test_after_a_connection_that_lasted_the_next_is_tried_at_once(start, path):
    link = Link(path)
    while link.wait_ns(time.monotonic_ns()) < RECONNECT_NS_MAX / 4:  # attempts become less frequent
        link.pump()
    first = start()
    while not link.session.epoch:
        readable(link, link.wait_ns(time.monotonic_ns()) / 1e9)
        link.pump()
    time.sleep(RECONNECT_NS_MAX / 1e9 + 0.05)
    first.stop()
    while link.connection is not None:
        link.pump()
    assert link.wait_ns(time.monotonic_ns()) <= 2 * RECONNECT_NS
    link.close()


def test_a_connection_is_replaced_in_the_call_that_finds_it_broken(start, path):
    first = start()
    link = Link(path)
    while not link.session.epoch:
        readable(link, PATIENCE_SECONDS)
        link.pump()
    time.sleep(RECONNECT_NS_MAX / 1e9 + 0.05)
    first.stop()
    start()
    before = link.connection
    link.pump()
    assert link.connection not in (None, before)
    link.close()


def test_a_client_that_was_idle_over_a_restart_notices_at_its_next_word(start, path, no_timers):
    first = start()
    with Client(path) as client:
        echo(client)
        time.sleep(RECONNECT_NS_MAX / 1e9 + 0.05)
        first.stop()
        second = start()
        echo(client, 2)
        assert len(second.peers) == 1


def test_a_supervisor_that_does_not_read_stops_nobody_and_loses_nothing(path):
    """Bytes that the kernel does not take wait in the client, which watches for room."""
    with listening(path) as listener:
        link = Link(path)
        peer, _ = listener.accept()
        peer.settimeout(PATIENCE_SECONDS)
        peer.sendall(ROUTER)
        assert readable(link, PATIENCE_SECONDS)
        link.pump()
        messages = [b"%d" % n * 100_000 for n in range(1, 8)]
        link.session.outbox.extend(messages)
        link.pump()
        assert not readable(link, 0.05)
        frames = b"".join(b"\x02" + len(m).to_bytes(8, "big") + m for m in messages)
        said = b""
        while not said.endswith(frames):
            said += peer.recv(100_000)
            if readable(link, 0.05):
                link.pump()
        assert not readable(link, 0.05)  # no longer watches for room
        peer.close()
        link.close()


def test_a_message_of_several_frames_is_dropped_and_counted(start, path, caplog):
    supervisor = start()
    supervisor.several = True
    with Client(path) as client:
        echo(client)
        assert client._link.malformed >= 3
    assert len([r for r in caplog.records if "several frames" in r.getMessage()]) == 1


def test_after_ctrl_c_in_the_middle_of_a_message_all_is_asked_again(start, path, monkeypatch):
    supervisor = start()
    with Client(path) as client:
        echo(client)
        session, struck = client._link.session, []
        receive = session.receive

        def strike(now_ns: int, message: object) -> None:
            if isinstance(message, Results) and not struck:
                struck.append(message)
                raise KeyboardInterrupt
            receive(now_ns, message)

        monkeypatch.setattr(session, "receive", strike)
        task = client.submit("demo.echo", {"n": 2})
        with contextlib.suppress(KeyboardInterrupt):  # else it strikes the background thread
            task.result(1.0)
        assert struck
        assert task.result(PATIENCE_SECONDS) == {"n": 2}  # over a new connection, which asks again
        assert len(supervisor.peers) == 2


# -- forks ------------------------------------------------------------------------------------


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_that_closes_its_copy_or_ends_disturbs_nobody(start, path):
    supervisor = start()
    with Client(path) as client:
        echo(client)
        for work in (lambda: None, client.close, client._link.close):
            os.waitpid(fork(work), 0)
            echo(client, 2)
        assert len(supervisor.peers) == 1


def test_a_connection_that_a_fork_keeps_open_is_not_heard_of_when_it_has_ended(path):
    with listening(path) as listener:
        link = Link(path)
        peer, _ = listener.accept()
        child = fork(lambda: (peer.close(), time.sleep(PATIENCE_SECONDS)))
        try:
            peer.close()
            assert readable(link, PATIENCE_SECONDS)
            link.pump()
            assert link.connection is None
            assert not readable(link, 0.1)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            link.close()
