"""`python -m musterd.workers MODULE[:CLASS] ...`: can these be loaded as workers? One line each.

`concurrency=4=MODULE[:CLASS]` asks whether it can run so many tasks at once, too;
`backoff=MODULE:FUNCTION` asks about a strategy of retries instead. After `--options` the options of
the workers are read from standard input, one JSON object, and checked by `Worker.check_options`.

Run by `musterd check-config` in a process of its own, because importing is running code.
"""

import sys
from typing import Any

import msgspec

from musterd.ipc.user_code import make_importable
from musterd.workers.retrying import load_backoff
from musterd.workers.runtime import check_concurrency, load

BACKOFF = "backoff="
CONCURRENCY = "concurrency="
OPTIONS = "--options"


def main(names: list[str]) -> int:
    failed = 0
    options: dict[str, Any] = {}
    if names[:1] == [OPTIONS]:
        names = names[1:]
        options = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Any])
    make_importable()
    for name in names:
        try:
            if name.startswith(BACKOFF):
                load_backoff(name.removeprefix(BACKOFF))
                continue
            number, _, worker = name.removeprefix(CONCURRENCY).rpartition("=")
            loaded = load(worker)
            check_concurrency(loaded, int(number or 1))
            if loaded.factory is not None:
                loaded.factory.check_options(options)
        except BaseException as error:  # noqa: BLE001 - whatever the import does is the answer
            failed += 1
            print(f"{name}\terror\t{type(error).__name__}: {error}".replace("\n", " "))
        else:
            methods = ", ".join(each.method for each in loaded.declarations)
            print(f"{name}\tok\t{methods}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
