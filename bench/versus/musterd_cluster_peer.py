"""musterd on PostgreSQL: two daemons as two nodes, half of the workers each.

The client is at the first node. A task is committed before it is acknowledged, and its result
before it is told, as without a cluster.
"""

import os
from typing import Any

import musterd_peer
import peer
from fleet import Fleet
from nodes import node

WORKER = musterd_peer.WORKER
NODES = 2


class ClusterPeer(musterd_peer.MusterdPeer):
    def __init__(self) -> None:
        super().__init__()
        self._others: list[Fleet] = []

    def start(self, workers: int) -> None:
        places = max(1, workers // NODES)
        url = os.environ["BENCH_POSTGRES"]
        fleets = [
            node(peer.FOLDER / f"node{number}", f"node{number}", url, {"bench": (WORKER, places)})
            for number in range(NODES)
        ]
        self._fleet, *self._others = fleets
        for each in fleets:
            each.folder.mkdir(mode=0o700)
            each.start()
        self._client = self._fleet.client()

    def mains(self) -> list[int]:
        return [*super().mains(), *(each.pid for each in self._others)]

    def stop(self) -> Any:
        super().stop()
        for each in self._others:
            each.stop()
        self._others.clear()


if __name__ == "__main__":
    peer.serve(ClusterPeer())
