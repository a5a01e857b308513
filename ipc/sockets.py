"""The supervisor's ROUTER for clients, which is libzmq's.

Its peers speak to it through ipc/zmtp.py and load no libzmq, or are any other client of ZeroMQ.
"""

from typing import Any

import zmq
import zmq.backend

from musterd.ipc.messages import WIRE_BYTES_MAX

# pyzmq's own conveniences take twice as long as what they do, for each message: plain numbers, and
# the methods below them.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
_backend: Any = zmq.backend.Socket
_send, _recv, _get = _backend.send, _backend.recv, _backend.get

ROUTER_QUEUE_MAX = 1000  # messages per peer; beyond it a send says EAGAIN (ROUTER_MANDATORY)


def make_router(
    context: zmq.Context[zmq.Socket[bytes]], messages_max: int = ROUTER_QUEUE_MAX
) -> zmq.Socket[bytes]:
    """A ROUTER. Sends to a peer that is gone or full raise instead of being dropped."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, messages_max)
    socket.setsockopt(zmq.RCVHWM, ROUTER_QUEUE_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, WIRE_BYTES_MAX)
    return socket


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether something can be received."""
    return bool(_get(socket, _EVENTS) & _POLLIN)


def receive(socket: zmq.Socket[bytes], count_max: int) -> list[tuple[bytes, bytes | None]]:
    """What a ROUTER has received: (identity, frame), None for a message of several frames.

    Frame by frame and with a look at EVENTS, because recv_multipart and the exception that ends
    a loop of them cost more than the messages.
    """
    found: list[tuple[bytes, bytes | None]] = []
    while len(found) < count_max and has_message(socket):
        identity = _recv(socket, _NOBLOCK)
        frame: bytes | None = _recv(socket, _NOBLOCK)
        while _get(socket, _RCVMORE):
            _recv(socket, _NOBLOCK)
            frame = None
        found.append((identity, frame))
    return found


def send(socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> None:
    """From a ROUTER to one peer; zmq.Again if it is full, EHOSTUNREACH if it is gone."""
    _send(socket, identity, _NOBLOCK_MORE)
    _send(socket, frame, _NOBLOCK)
