"""Say what to type in the place of a command, or an action, that does not exist.

A word of another program is answered with what does the same here; any other with the command that
takes the fewest slips of the finger: a letter too many, too few, wrong, or changed with the next.
"""

import shlex
from collections.abc import Iterable, Sequence

SLIPS_MAX = 2  # more is another word
BEGUN_MIN = 3  # letters: with fewer nobody knows what was meant

STATUS, TASKS = "type musterctl status", "type musterctl tasks"
SUBMIT = "type musterctl submit POOL.METHOD name=value"
SCHEDULE = "type musterctl schedule list"
NODES = "type musterctl cluster nodes"
# Commands of other programs, and other words for what there is.
OTHER_WORDS = {
    **dict.fromkeys(
        ("ps", "ls", "list", "info", "stat", "stats", "health", "ping", "uptime", "state"), STATUS
    ),
    **dict.fromkeys(("pool", "pools", "worker", "workers", "slots", "processes"), STATUS),
    "kill": "type musterctl cancel ID to end a task, musterctl restart POOL/N to replace a worker, "
    "or musterctl signal KILL POOL/N",
    **dict.fromkeys(
        ("log", "logs", "journal"),
        "type musterctl tail -f NAME for what workers write, musterctl events -f for what happens",
    ),
    **dict.fromkeys(("queue", "queues", "job", "jobs", "running", "waiting"), TASKS),
    **dict.fromkeys(("failed", "failures", "errors", "dlq"), "type musterctl dead"),
    **dict.fromkeys(
        ("inspect", "result", "show", "get"),
        "type musterctl task ID for a task, musterctl status NAME for a pool or a worker",
    ),
    **dict.fromkeys(("call", "enqueue", "send", "push", "exec"), SUBMIT),
    **dict.fromkeys(
        ("delete", "rm", "del"),
        "type musterctl cancel ID to end a task, musterctl purge ID to forget a failed one, "
        "musterctl schedule remove NAME for a schedule",
    ),
    **dict.fromkeys(("revoke", "abort"), "type musterctl cancel ID"),
    **dict.fromkeys(("rerun", "requeue", "replay"), "type musterctl retry ID"),
    **dict.fromkeys(("hold", "suspend", "quiet", "disable"), "type musterctl pause NAME"),
    **dict.fromkeys(("unpause", "undrain", "continue", "enable"), "type musterctl resume NAME"),
    **dict.fromkeys(("incr", "decr", "resize", "autoscale"), "type musterctl scale POOL N"),
    **dict.fromkeys(("hup", "daemon-reload", "refresh"), "type musterctl reload"),
    **dict.fromkeys(("diff", "plan"), "type musterctl reread"),
    **dict.fromkeys(("halt", "poweroff", "down"), "type musterctl shutdown"),
    **dict.fromkeys(
        ("is-active", "is-failed"), "type musterctl status NAME: its exit code says it"
    ),
    "reset-failed": "type musterctl reset NAME",
    **dict.fromkeys(("monitor", "monit", "watch", "htop", "dashboard"), "type musterctl top"),
    **dict.fromkeys(("mem", "free", "ram"), "type musterctl memory"),
    **dict.fromkeys(("cron", "crontab", "timers", "list-timers", "beat"), SCHEDULE),
    **dict.fromkeys(("circuit", "circuits", "site", "sites"), "type musterctl breaker list"),
    **dict.fromkeys(("login", "logins", "cookies"), "type musterctl sessions list"),
    **dict.fromkeys(("notify", "notifications"), "type musterctl alerts list"),
    **dict.fromkeys(("node", "nodes", "machines"), NODES),
    **dict.fromkeys(("config", "settings"), "type musterd show-config"),
    "run": "type musterctl submit POOL.METHOD to run a task, musterctl schedule run NAME for a "
    "schedule, musterd run to run the daemon",
}
# Commands of musterd, which runs and configures the daemon.
OF_MUSTERD = ("check-config", "show-config", "demo", "dev", "new", "web", "install", "uninstall")
# What people type for the daemon itself; commands of musterctl with these names are for workers.
_START = "type musterd run -c FILE to run the daemon here, systemctl start musterd for the service"
OF_DAEMON = {
    **dict.fromkeys(("start", "serve", "up", "daemon"), _START),
    "stop": "type musterctl shutdown to end the daemon, systemctl stop musterd for the service",
    "restart": "type systemctl restart musterd for the service; musterctl restart NAME for workers",
    **dict.fromkeys(
        ("init", "create", "startproject"), "type musterd new NAME to make a project of that name"
    ),
    **dict.fromkeys(("check", "validate", "configtest"), "type musterd check-config -c FILE"),
    "version": "type musterd --version",
}
# Other words for an action, the first that the command has.
OTHER_ACTIONS = {
    **dict.fromkeys(("ls", "show", "status", "get", "all"), ("list", "show")),
    **dict.fromkeys(("delete", "rm", "del", "drop", "clear"), ("remove", "forget", "reset")),
    **dict.fromkeys(("new", "create", "put", "insert"), ("add",)),
    **dict.fromkeys(("change", "update", "set", "modify"), ("edit",)),
    **dict.fromkeys(("start", "enable", "unpause", "continue"), ("resume", "close")),
    **dict.fromkeys(("stop", "hold", "suspend"), ("pause", "open")),
    **dict.fromkeys(("trigger", "fire", "now", "exec", "submit"), ("run", "test")),
    **dict.fromkeys(("send", "try", "check"), ("test",)),
    **dict.fromkeys(("trust", "believe", "sync"), ("accept",)),
    "disable": ("disable", "pause"),
    "off": ("disable", "pause"),
    "on": ("resume", "close"),
}


def slips(typed: str, meant: str) -> int:
    """Return how many letters are too many, too few, wrong, or changed with the next one."""
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for at, letter in enumerate(typed, 1):
        former, before, row = before, row, [at]
        for place, other in enumerate(meant, 1):
            cost = min(before[place] + 1, row[-1] + 1, before[place - 1] + (letter != other))
            if at > 1 and place > 1 and letter == meant[place - 2] and typed[at - 2] == other:
                cost = min(cost, former[place - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(typed: str, words: Iterable[str]) -> str:
    """Return the word that was probably meant; "" if none is near."""

    def key(word: str) -> tuple[int, bool, bool, int]:
        same_letters = sorted(word) == sorted(typed)
        return slips(typed, word), not same_letters, word[0] != typed[:1], -_same(typed, word)

    near = [word for word in words if slips(typed, word) <= min(SLIPS_MAX, len(word) // 2)]
    return min(near, key=key, default="")


def _same(typed: str, word: str) -> int:
    """Return how many letters are the same at the beginning."""
    return next(
        (at for at, pair in enumerate(zip(typed, word, strict=False)) if pair[0] != pair[1]),
        min(len(typed), len(word)),
    )


def instead_of(name: str, rest: Sequence[str], commands: Sequence[str]) -> str:
    """Say what to type in the place of a command that there is not."""
    if name in OF_MUSTERD:
        return f"the daemon has it: type musterd {name}"
    if name in OTHER_WORDS:
        return OTHER_WORDS[name]
    if near := nearest(name, commands) or _begun(name, commands):
        return f"did you mean musterctl {shlex.join((near, *rest))}?"
    if near := nearest(name, OTHER_WORDS):
        return OTHER_WORDS[near]
    return "musterctl --help lists them"


def instead_of_musterd(
    name: str, rest: Sequence[str], own: Sequence[str], commands: Sequence[str]
) -> str:
    """Say what to type where `musterd` has no such command; `commands` are those of musterctl."""
    if name in OF_DAEMON:
        return OF_DAEMON[name]
    if name in commands:
        return f"type musterctl {shlex.join((name, *rest))}, which steers the daemon that runs"
    if near := nearest(name, own) or _begun(name, own):
        return f"did you mean musterd {shlex.join((near, *rest))}?"
    if (near := nearest(name, (*commands, *OF_DAEMON))) in OF_DAEMON:
        return OF_DAEMON[near]
    said = instead_of(name, rest, commands)
    return "musterd --help lists them" if said.startswith("musterctl --help") else said


def _begun(typed: str, words: Iterable[str]) -> str:
    """Return the only word that begins so."""
    begun = [word for word in words if len(typed) >= BEGUN_MIN and word.startswith(typed)]
    return begun[0] if len(begun) == 1 else ""


def instead_of_action(typed: str, actions: Sequence[str]) -> str:
    """Return the action that was probably meant; "" if none is near."""
    meant = [action for action in OTHER_ACTIONS.get(typed, ()) if action in actions]
    return meant[0] if meant else nearest(typed, actions) or _begun(typed, actions)
