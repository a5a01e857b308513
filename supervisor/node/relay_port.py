"""tasks.sock, as the cluster sidecar serves it: what others are asked first is an event here.

A question is charged to its connection until it is answered, like a submit. What the supervisor
answers is passed on as it came.
"""

from musterd.ipc.wire.messages import Advise, Inspect, Invalidate, TaskView
from musterd.supervisor.cluster.sidecar_events import AdviceAsked, Invalidated, ViewAsked
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.owed import Inspection
from musterd.supervisor.sockets.peers import AdviceWanted, Peer


class RelayPort(ClientPort):
    def _event_of(self, peer: Peer, message: object, size: int, wall_ns: int) -> object | None:
        peer.known = True
        if type(message) is Inspect:
            return ViewAsked(peer.name, self._begin(peer, message.request, size), message.id)
        if type(message) is Advise:
            return AdviceAsked(peer.name, self._begin(peer, message.request, size))
        if type(message) is Invalidate:
            return Invalidated(peer.name, message.key, message.prefix)
        return super()._event_of(peer, message, size, wall_ns)

    def peer_of(self, name: bytes) -> Peer | None:
        return self._named.get(name)

    def takes_more(self, peer: Peer) -> bool:
        """Whether the peer may be sent more of what others answer."""
        return not self._is_full(peer, 0)

    def pass_on(self, name: bytes, frame: bytes) -> None:
        """Send what another process has answered."""
        peer = self._named.get(name)
        if peer is not None:
            self._send(peer, frame)

    def answer_view(self, token: int, id_: str, view: TaskView | None) -> None:
        """Answer an Inspect; None: have it looked up, those who were asked first do not know."""
        request = self._end_request(token)
        if request is None or request.number is None or request.peer.gone:
            return
        if view is not None:
            self.inspected(request.peer, request.number, view)
        else:
            self._owe(request.peer, [Inspection(request.number, id_)])

    def answer_advice(self, token: int, workers: dict[str, int]) -> None:
        request = self._end_request(token)
        if request is not None and request.number is not None:
            self.advise(AdviceWanted(request.peer, request.number), workers)
