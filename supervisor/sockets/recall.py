"""Questions of clients for results of schedules, answered from the store."""

from musterd.supervisor.core.model.watching import HISTORY, history_key
from musterd.supervisor.core.tasks.refusals import UNREADABLE
from musterd.supervisor.shell import Shell
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.peers import HistoryWanted
from musterd.supervisor.store.interface import FindFacts
from musterd.supervisor.store.requests import BUSY
from musterd.supervisor.views.history import entries_of


def recall(shell: Shell, clients: ClientPort, wanted: HistoryWanted) -> None:
    """Answer with the entries that are kept: the newest ones, or those of the numbers."""
    question = wanted.question
    schedule = shell.fleet.schedules.get(question.schedule)
    if schedule is None:
        clients.recall(wanted, [], f"there is no schedule '{question.schedule}'", unknown=True)
        return
    if shell.store_requests.full:
        clients.recall(wanted, [], BUSY)
        return
    kept = [each.number for each in schedule.record.watched.history]
    if question.numbers:
        numbers = [each for each in kept if each in question.numbers]
    else:
        numbers = kept[-question.limit :]

    def found(values: list[bytes | None]) -> None:
        clients.recall(wanted, [each for each in entries_of(values) if each is not None])

    keys = [history_key(question.schedule, number) for number in numbers]
    shell.store_requests.ask(
        FindFacts(HISTORY, keys), found, lambda: clients.recall(wanted, [], UNREADABLE)
    )
