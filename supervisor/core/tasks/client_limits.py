"""Client limits: how many bytes connections may make the supervisor hold, and which are dropped.

Every byte that a connection makes the supervisor keep is counted: half-read messages, unanswered
requests, answers that were not taken. A connection with too many such bytes is not read: its
messages fill the kernel's buffer, and its client waits. While all connections together hold too
much, only connections below their share are read, so ordinary clients are served. Where the held
bytes wait for the peers themselves (the other half of a message, the reading of an answer), the
connections that have not moved for longest are dropped, and those that move so slowly that others
would wait for minutes. Their clients reconnect and ask again.
"""

from collections.abc import Iterable

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB

# Of all connections together. The daemon itself needs some 60 MB and is to stay below 300 MB with a
# hundred connections that do their worst: some bytes are copied, and the shares below come on top.
ALL_BYTES_MAX = 96 * MIB
# Unanswered requests of one connection: more than our own client has under way, and a commit takes
# milliseconds. A single request may be larger.
PENDING_BYTES_MAX = 8 * MIB
# What a connection may always hold; less with thousands of connections.
SHARE_BYTES_MAX = 256 * KIB
SHARE_BYTES_MIN = 16 * KIB
OUTBOX_BYTES_MAX = 2 * MIB  # answers not taken: beyond this the connection is not read ...
OUTBOX_BYTES_LAST = 32 * MIB  # ... and beyond this it is dropped
OWED_MAX = 100_000  # ids of results owed to one connection; its client may ask again
FAULTS_MAX = 100  # malformed messages of one connection
STALLED_LOOKS = 2  # looks, one a second, without a byte moved: dropped when bytes are short
# Looks in a row at which a connection held more than its share and had moved less than it held at
# the look before: megabytes take a client milliseconds.
SLOW_LOOKS = 5
HALF_MESSAGE_LOOKS = 60  # looks with half a message and no byte moved: dropped in any case
# Memory that a request takes beside the bytes of its message.
REQUEST_BYTES = 2 * KIB
TASK_BYTES = 512  # per task of a submit: its object and its part of the answer
ID_BYTES = 160


class Holding(Struct, gc=False):
    """What one connection makes the supervisor hold, in bytes."""

    number: int
    half_read: int  # of a message that arrived in part
    unsent: int  # of answers not taken
    pending: int  # of unanswered requests
    looks: int = 0  # in a row without a byte moved
    slow: int = 0  # looks in a row that found less moved than it held at the look before

    @property
    def of_the_peer(self) -> int:
        """Return the bytes that only the peer can release."""
        return self.half_read + self.unsent

    @property
    def gives_way(self) -> bool:
        """Return whether the connection may be dropped when bytes are short."""
        stalled = self.looks >= STALLED_LOOKS and self.of_the_peer > 0
        return stalled or (self.slow >= SLOW_LOOKS and self.of_the_peer > SHARE_BYTES_MAX)


def share(connections: int) -> int:
    """Return what each connection may hold while all together hold too much."""
    return max(SHARE_BYTES_MIN, min(SHARE_BYTES_MAX, ALL_BYTES_MAX // max(1, connections)))


def may_speak(holding: Holding, all_bytes: int, connections: int) -> bool:
    """Return whether a connection is to be read."""
    if holding.pending > PENDING_BYTES_MAX or holding.unsent > OUTBOX_BYTES_MAX:
        return False
    if all_bytes <= ALL_BYTES_MAX:
        return True
    return holding.of_the_peer + holding.pending <= share(connections)


def takes(size: int, unsent: int, all_bytes: int, connections: int) -> bool:
    """Return whether a connection may be sent a result of this size now; else it is owed."""
    if unsent > OUTBOX_BYTES_MAX:
        return False
    return all_bytes + size <= ALL_BYTES_MAX or unsent + size <= share(connections)


def fits(size: int, all_bytes: int) -> bool:
    """Return whether an answer of this size may be fetched for a connection."""
    return size <= SHARE_BYTES_MAX or all_bytes + size <= ALL_BYTES_MAX


def who_gives_way(
    holdings: Iterable[Holding], all_bytes: int, *, awaited_bytes: int = 0
) -> list[Holding]:
    """Choose connections to drop; another connection would read `awaited_bytes` if they fitted.

    Half of the limit is freed, so that the next look does not find the same shortage.
    """
    stalled: list[Holding] = []
    half_messages: list[Holding] = []
    waiting = 0
    for holding in holdings:
        waiting += holding.of_the_peer
        if holding.looks >= HALF_MESSAGE_LOOKS and holding.half_read:
            half_messages.append(holding)
        elif holding.gives_way:
            stalled.append(holding)
    if all_bytes + awaited_bytes <= ALL_BYTES_MAX or waiting <= ALL_BYTES_MAX // 2:
        return half_messages
    stalled.sort(key=lambda each: (each.looks, each.slow, each.of_the_peer), reverse=True)
    chosen = half_messages
    excess = all_bytes - ALL_BYTES_MAX // 2 - sum(each.of_the_peer for each in chosen)
    for each in stalled:
        if excess <= 0:
            break
        chosen.append(each)
        excess -= each.of_the_peer
    return chosen
