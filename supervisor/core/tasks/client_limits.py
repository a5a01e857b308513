"""How much clients may make the supervisor hold, and which of them give way when it is too much.

Theory of operation. Whatever a connection makes the supervisor keep is counted from its first byte
on: messages that have arrived in part, requests and questions that are not answered yet, answers
that were not taken. Nobody is read who has too much of it under way: it fills the buffer of the
kernel, and then it waits. While all connections together hold too much, only those are read that
hold less than their share, so whoever does ordinary things is served. Where that does not help,
because what is held waits for the peers themselves (the other half of a message, the reading of an
answer), those that have not moved for longest are put out, and those that move so slowly that
others would wait for minutes. Their clients come back by themselves and ask again.
"""

from collections.abc import Iterable

from msgspec import Struct

KIB = 1024
MIB = 1024 * KIB

# Of all connections together. The daemon needs some 60 MB itself and is to stay below 300 with a
# hundred connections that do their worst: there are copies for moments, and the shares below.
ALL_BYTES_MAX = 96 * MIB
# Requests and questions of one connection that are not answered: more than a client of ours has
# under way, and a commit takes milliseconds. A single one may be larger.
PENDING_BYTES_MAX = 8 * MIB
# What anybody may hold, whatever others do; less where there are thousands of them.
SHARE_BYTES_MAX = 256 * KIB
SHARE_BYTES_MIN = 16 * KIB
OUTBOX_BYTES_MAX = 2 * MIB  # answers that are not taken: then nothing more is read ...
OUTBOX_BYTES_LAST = 32 * MIB  # ... and with so much of those that were under way it is put out
OWED_MAX = 100_000  # ids of results that one connection is owed; it may ask for them again
FAULTS_MAX = 100  # malformed messages of one connection
STALLED_LOOKS = 2  # looks, one a second, without a byte moved: who gives way when it matters ...
# Looks in a row at which a connection held more than its share, and had not taken or sent since the
# last one what it held then: megabytes take a client milliseconds.
SLOW_LOOKS = 5
HALF_MESSAGE_LOOKS = 60  # ... and who does even when it does not, with half a message
# What stays of a request or a question in our memory, beside the bytes of its message.
REQUEST_BYTES = 2 * KIB
TASK_BYTES = 512  # each task of a submit, as an object and in the answer to it
ID_BYTES = 160


class Holding(Struct, gc=False):
    """What one connection makes the supervisor hold, in bytes."""

    number: int
    half_read: int  # of a message that has arrived in part
    unsent: int  # of answers that it has not taken
    pending: int  # of requests and questions that are under way
    looks: int = 0  # how often it was looked at without a byte moved ...
    slow: int = 0  # ... and without as much moved as it held at the look before

    @property
    def of_the_peer(self) -> int:
        """What only the peer can bring to an end."""
        return self.half_read + self.unsent

    @property
    def gives_way(self) -> bool:
        """Whether it may be put out when it matters."""
        stalled = self.looks >= STALLED_LOOKS and self.of_the_peer > 0
        return stalled or (self.slow >= SLOW_LOOKS and self.of_the_peer > SHARE_BYTES_MAX)


def share(connections: int) -> int:
    """What each may hold while all hold too much."""
    return max(SHARE_BYTES_MIN, min(SHARE_BYTES_MAX, ALL_BYTES_MAX // max(1, connections)))


def may_speak(holding: Holding, all_bytes: int, connections: int) -> bool:
    """Whether a connection is to be read."""
    if holding.pending > PENDING_BYTES_MAX or holding.unsent > OUTBOX_BYTES_MAX:
        return False
    if all_bytes <= ALL_BYTES_MAX:
        return True
    return holding.of_the_peer + holding.pending <= share(connections)


def takes(size: int, unsent: int, all_bytes: int, connections: int) -> bool:
    """Whether a connection may be sent a result of this size now; else it is owed to it."""
    if unsent > OUTBOX_BYTES_MAX:
        return False
    return all_bytes + size <= ALL_BYTES_MAX or unsent + size <= share(connections)


def fits(size: int, all_bytes: int) -> bool:
    """Whether an answer of this size may be fetched for a connection."""
    return size <= SHARE_BYTES_MAX or all_bytes + size <= ALL_BYTES_MAX


def who_gives_way(
    holdings: Iterable[Holding], all_bytes: int, *, awaited_bytes: int = 0
) -> list[Holding]:
    """Connections to put out; `awaited_bytes` are waited for by another one that would read them.

    Half of the limit is to be free again, so that the next look finds something else.
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
