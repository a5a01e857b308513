"""Check sessions: never more tasks of one at once than it has places, whoever dies.

Nothing starves: as for all tasks, the runner checks that each has ended at the end of a scenario.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from musterd.ipc.wire.messages import Lease
from simulation.profile import SESSIONS

if TYPE_CHECKING:
    from simulation.workers import Worker


class SessionWatch:
    def __init__(self) -> None:
        self._users: dict[str, dict[int, Worker]] = {name: {} for name in SESSIONS}  # by lease
        self.runs = 0  # attempts that used a session
        self.handed_on = 0  # those of them that began where another worker had used it

    def new_life(self) -> None:
        for users in self._users.values():
            users.clear()

    def began(self, worker: Worker, lease: Lease) -> None:
        if not lease.session:
            return
        users = self._users[lease.session]
        if any(not each.alive for each in users.values()):
            self.handed_on += 1
        others = [number for number, each in users.items() if each.alive]
        limit = SESSIONS[lease.session].concurrent
        assert len(others) < limit, f"{lease.id} uses {lease.session} beside leases {others}"
        self._users[lease.session] = {number: users[number] for number in others}
        self._users[lease.session][lease.lease] = worker
        self.runs += 1

    def ended(self, lease: Lease) -> None:
        if lease.session:
            self._users[lease.session].pop(lease.lease, None)
