"""A shop and a web hook on loopback, for tests of alerts about changes."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Loopback:
    """A shop whose page changes, and a web hook that keeps what it hears."""

    def __init__(self) -> None:
        here = self
        self.page = ""
        self.heard: list[dict[str, Any]] = []
        self.answers = threading.Event()  # cleared: the hook keeps its callers waiting
        self.answers.set()
        self.calls = 0
        self.takes_files = True

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = here.page.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):  # a browser opens connections that it does not use
                    self.wfile.write(body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                here.calls += 1
                here.answers.wait(60)
                told = json.loads(body)
                taken = here.takes_files or not told.get("attachments")
                if taken:
                    here.heard.append(told)
                try:
                    self.send_response(200 if taken else 413)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:  # the caller was killed
                    return

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}/kites"
        self.hook = f"json://127.0.0.1:{port}/hook"

    def show(self, price: str) -> None:
        self.page = f"<html><body><p class=price>{price}</p></body></html>"

    def titles(self) -> list[str]:
        return [each["title"] for each in self.heard]

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
