"""Decode the messages of node.sock: apart from codec.py, whose users have no cluster."""

import msgspec

from musterd.ipc.wire.codec import checked
from musterd.ipc.wire.node_messages import NodeMessage, SidecarMessage

_sidecar = msgspec.msgpack.Decoder(SidecarMessage)
_node = msgspec.msgpack.Decoder(NodeMessage)


def decode_sidecar(frame: bytes | bytearray) -> SidecarMessage:
    """Decode a message that the sidecar sent."""
    return checked(_sidecar, frame)  # type: ignore[no-any-return]


def decode_node(frame: bytes | bytearray) -> NodeMessage:
    """Decode a message that the supervisor sent to the sidecar."""
    return checked(_node, frame)  # type: ignore[no-any-return]
