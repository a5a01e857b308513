"""The keys of `musterctl top`, and what they select.

j k, arrows, page keys   select a worker; the list follows
s                        sort by the next of ORDERS
/                        filter by words: Enter keeps them, Escape shows all again
r, then y                restart the selected worker; any other key cancels
"""

from typing import Any, NamedTuple

from musterd.supervisor.api import rpc
from musterd.supervisor.api.status import BACKOFF, FATAL, WorkerStatus
from musterd.supervisor.ctl.top_feed import Snapshot, Use

ORDERS = ("name", "cpu", "memory", "age")
FILTER_CHARS_MAX = 60
PAGE = 10
STEPS = {  # workers to move by, for each key
    **dict.fromkeys(("j", "\x1b[B", "\x1bOB"), 1),
    **dict.fromkeys(("k", "\x1b[A", "\x1bOA"), -1),
    **dict.fromkeys((" ", "\x1b[6~"), PAGE),
    **dict.fromkeys(("b", "\x1b[5~"), -PAGE),
}
ENTER = ("\r", "\n")
ERASE = ("\x7f", "\x08")
ESCAPE = "\x1b"


class View(NamedTuple):
    order: str = "name"
    chosen: str = ""  # worker
    words: str = ""  # filter of workers
    typing: bool = False  # the filter is being typed
    asked: str = ""  # worker to restart if the next key confirms it


def ordered(now: Snapshot, order: str) -> list[WorkerStatus]:
    """Return workers with problems first, then by the selected order."""
    workers = [worker for pool in now.fleet.pools for worker in pool.workers]
    none = Use()

    def key(worker: WorkerStatus) -> Any:
        use = now.uses.get(worker.name, none)
        by = {
            "cpu": -use.cpu_share,
            "memory": -(worker.memory_bytes or use.rss_bytes),
            "age": worker.uptime_seconds,
        }
        return (worker.state not in (FATAL, BACKOFF), by.get(order, 0.0))

    return sorted(workers, key=key)


def listed(now: Snapshot, view: View) -> list[WorkerStatus]:
    """Return the workers that match the filter, in order."""
    words = view.words.lower().split()
    return [worker for worker in ordered(now, view.order) if _has(worker, words)]


def _has(worker: WorkerStatus, words: list[str]) -> bool:
    told = (worker.name, worker.state, worker.halt, worker.method, worker.task_id, worker.reason)
    text = " ".join(told).lower()
    return all(word in text for word in words)


def press(view: View, key: str, now: Snapshot) -> tuple[View, rpc.Params | None]:
    """Return the view after a key, and the request for the daemon."""
    if view.asked:
        wanted = rpc.Restart(names=[view.asked], no_block=True) if key in ("y", "Y") else None
        return view._replace(asked=""), wanted
    return (_typed(view, key) if view.typing else _chosen(view, key, now)), None


def _chosen(view: View, key: str, now: Snapshot) -> View:
    names = [worker.name for worker in listed(now, view)]
    if key == "s":
        order = ORDERS[(ORDERS.index(view.order) + 1) % len(ORDERS)]
        return view._replace(order=order)
    if key == "/":
        return view._replace(typing=True)
    if key == ESCAPE:
        return view._replace(words="", chosen="")
    if key == "r" and view.chosen in names:
        return view._replace(asked=view.chosen)
    if key in STEPS and names:
        step = STEPS[key]
        at = names.index(view.chosen) + step if view.chosen in names else max(0, step - 1)
        return view._replace(chosen=names[max(0, min(at, len(names) - 1))])
    return view


def _typed(view: View, key: str) -> View:
    if key in ENTER:
        return view._replace(typing=False)
    if key == ESCAPE:
        return view._replace(typing=False, words="")
    if key in ERASE:
        return view._replace(words=view.words[:-1])
    if len(key) == 1 and key.isprintable() and len(view.words) < FILTER_CHARS_MAX:
        return view._replace(words=view.words + key)
    return view
