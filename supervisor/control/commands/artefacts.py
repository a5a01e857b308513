"""The command on control.sock that reads artefacts of failed attempts, a part at a time."""

from musterd.ipc.wire.artefacts import Artefact
from musterd.supervisor.api import rpc
from musterd.supervisor.api.rpc import RpcError
from musterd.supervisor.api.status import ArtefactList, ArtefactPart, ArtefactStatus
from musterd.supervisor.control.answers import Methods, Pending
from musterd.supervisor.shell import Shell

BUSY = RpcError(rpc.LIMIT_REACHED, "too many callers read artefacts: try again later")


def shown(found: list[Artefact]) -> list[ArtefactStatus]:
    """Return artefacts as callers see them: without their paths."""
    return [
        ArtefactStatus(
            name=each.name, attempt=each.attempt, at=each.wall_ns / 1e9, bytes=each.bytes
        )
        for each in found
    ]


class ArtefactCommands:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def methods(self) -> Methods:
        return {rpc.ListArtefacts: self._list, rpc.ReadArtefact: self._read}

    def _list(self, params: rpc.ListArtefacts) -> object:
        if self._shell.artefacts.full:
            return BUSY
        pending = Pending()

        def found(kept: list[Artefact]) -> None:
            pending.resolve(ArtefactList(artefacts=shown(kept)))

        self._shell.artefacts.find(params.id, found)
        return pending

    def _read(self, params: rpc.ReadArtefact) -> object:
        if self._shell.artefacts.full:
            return BUSY
        pending = Pending()

        def found(part: bytes | None) -> None:
            if part is None:
                why = f"no such artefact: {params.name!r}: see musterctl task {params.id}"
                pending.fail(RpcError(rpc.NO_SUCH_NAME, why))
            else:
                pending.resolve(ArtefactPart(data=part))

        self._shell.artefacts.read(
            params.id, params.name, params.offset, rpc.ARTEFACT_PART_BYTES, found
        )
        return pending
