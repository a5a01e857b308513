"""Submit a task every few milliseconds until told to stop, then print the outcome of each.

The program runs inside a machine, and goes on when the daemon there restarts.
"""

import json
import sys
import threading
import time

from musterd import Client
from musterd.ipc.errors import MusterdError


def main() -> None:
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    client = Client(sys.argv[1], connect_timeout=60)
    handles, refused = [], []
    longest = 0.0
    print("begun", flush=True)
    while not stop.is_set():
        began = time.monotonic()
        try:
            handle = client.submit("jobs.add", {"a": len(handles), "b": 1})
            handle.ack(timeout=60)
            handles.append(handle)
        except MusterdError as error:
            refused.append(f"{type(error).__name__}: {error}")
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.005)
    wrong = 0
    for number, handle in enumerate(handles):
        wrong += handle.result(timeout=60) != number + 1
    client.close()
    found = {"sent": len(handles), "refused": refused, "wrong": wrong, "longest": longest}
    print(json.dumps(found))


main()
