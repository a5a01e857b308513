"""Rights on control.sock, by the credentials that the kernel tells of each caller.

root, the daemon's own user, members of `control_group`    every method
members of `view_group`                                    methods that only look (VIEW_METHODS)
everybody else                                             none, and is told so

The mode of the socket's file keeps out callers without rights. A file has one group only, so with a
`view_group` the file lets in everybody, and this check alone tells them apart.
"""

import enum
import os
import socket

from msgspec import Struct

from musterd.supervisor.api import rpc
from musterd.supervisor.sockets.listen import Caller, caller_of, group_id_of, groups_of

# The state of the fleet; not arguments and results of tasks, output of workers, configuration.
# What a schedule watches is no secret result: its changes are events, which may be seen too.
VIEW_METHODS = frozenset(
    {
        "status",
        "memory",
        "metrics",
        "events",
        "pid",
        "version",
        "breaker.list",
        "clock",
        "schedule.list",
        "sessions.list",
        "changes",
        "history",
        "alerts",
    }
)


class Rank(enum.IntEnum):
    """What a caller may do; when there are too many, a lower rank gives way."""

    NONE = 0
    VIEW = 1
    CONTROL = 2
    OWN = 3  # root and the daemon's own user


class Admitted(Struct, frozen=True):
    caller: Caller
    rank: Rank


class Access:
    def __init__(self, control_group: str, view_group: str) -> None:
        self._control_group = control_group
        self._view_group = view_group
        self.group_id = group_id_of(control_group)
        self._view_id = group_id_of(view_group, "supervisor.view_group")

    @property
    def mode(self) -> int:
        """Mode of the socket's file."""
        return 0o660 if self._view_id in (None, self.group_id) else 0o666

    def of(self, sock: socket.socket) -> Admitted:
        caller = caller_of(sock)
        return Admitted(caller, self._rank(sock, caller))

    def _rank(self, sock: socket.socket, caller: Caller) -> Rank:
        if caller.uid in (0, os.geteuid()):
            return Rank.OWN
        if self.group_id is None and self._view_id is None:
            return Rank.NONE
        groups = {caller.gid, *groups_of(sock, caller)}
        if self.group_id in groups:
            return Rank.CONTROL
        return Rank.VIEW if self._view_id in groups else Rank.NONE

    def refusal(self, caller: Caller) -> rpc.RpcError:
        """Return the error for a caller without any rights."""
        groups = [group for group in (self._control_group, self._view_group) if group]
        member = f" and not in group {' or '.join(groups)}" if groups else ""
        return rpc.RpcError(
            rpc.NOT_ALLOWED,
            f"not allowed: uid {caller.uid} is not root, not the daemon's own user"
            f"{member}: use sudo or become a member of the daemon's control_group",
        )

    def check(self, admitted: Admitted, method: str) -> None:
        """Raise RpcError if this caller may not use the method."""
        if admitted.rank > Rank.VIEW or method in VIEW_METHODS:
            return
        raise rpc.RpcError(
            rpc.NOT_ALLOWED,
            f"not allowed: uid {admitted.caller.uid} is in group {self._view_group}, which may "
            f"only look ({', '.join(sorted(VIEW_METHODS))}), not {method[:100]}: use sudo or "
            "become a member of the daemon's control_group",
        )
