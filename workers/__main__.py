"""`python -m musterd.workers MODULE[:CLASS] ...`: can these be loaded as workers? One line each.

`concurrency=4=MODULE[:CLASS]` asks whether it can run so many tasks at once, too;
`backoff=MODULE:FUNCTION` asks about a strategy of retries instead.

Run by `musterd check-config` in a process of its own, because importing is running code.
"""

import sys

from musterd.ipc.user_code import make_importable
from musterd.workers.retrying import load_backoff
from musterd.workers.runtime import check_concurrency, load

BACKOFF = "backoff="
CONCURRENCY = "concurrency="


def main(names: list[str]) -> int:
    failed = 0
    make_importable()
    for name in names:
        try:
            if name.startswith(BACKOFF):
                load_backoff(name.removeprefix(BACKOFF))
                continue
            number, _, worker = name.removeprefix(CONCURRENCY).rpartition("=")
            loaded = load(worker)
            check_concurrency(loaded, int(number or 1))
        except BaseException as error:  # noqa: BLE001 - whatever the import does is the answer
            failed += 1
            print(f"{name}\terror\t{type(error).__name__}: {error}".replace("\n", " "))
        else:
            methods = ", ".join(each.method for each in loaded.declarations)
            print(f"{name}\tok\t{methods}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
