"""A site on loopback with a login: a form, a cookie, pages for those who are logged in."""

import http.server
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.cookies import SimpleCookie
from urllib.parse import parse_qs

USER, PASSWORD = "ada", "correct horse battery staple"

FORM = """<html><title>Log in</title><body><form id="login" method="post" action="/login">
<input name="user"><input name="password" type="password"><button>Log in</button></form></body>"""
ACCOUNT = "<html><title>Account of {user}</title><body><p class=user>{user}</p></body>"
# A page that has something else in the place of local storage.
FORGED = """<html><title>Forged</title><body><script>
const value = {text: "text", number: 1, deep: {a: [null]}, half: "\\ud800"};
Object.defineProperty(window, "localStorage", {value});
</script></body>"""
# Cookies that clients keep and Chromium refuses: what their names promise is not so, and None
# without Secure.
ODD = ("__Host-odd=1", "__Secure-odd=1", "none=1; SameSite=None")
# Written by JavaScript: local storage has the token that the page shows.
APP = """<html><title>App</title><body><p id="token"></p><script>
document.getElementById("token").textContent = localStorage.getItem("token") || "none";
</script></body>"""


class LoginSite:
    def __init__(self) -> None:
        self.sids: set[str] = set()
        self.logins = 0
        self.tries = 0  # of logins
        self.forgetful = False  # it does not know whom it has let in
        self.refused = 0  # visits without a cookie that is known
        self.inside = 0
        self.most_inside = 0  # requests of accounts at once
        self._lock = threading.Lock()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.get(self)

            def do_POST(self) -> None:
                site.post(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def expire(self) -> None:
        """Forget everybody who is logged in."""
        with self._lock:
            self.sids.clear()

    def get(self, request: http.server.BaseHTTPRequestHandler) -> None:
        match request.path:
            case "/login":
                _answer(request, FORM)
            case "/account":
                self._account(request)
            case "/strict":
                _answer(request, "hello" if self._knows(request) else "no", 200, strict=True)
            case "/app":
                _answer(request, APP)
            case "/forged":
                _answer(request, FORGED)
            case "/odd":
                _answer(request, "odd", cookies=ODD)
            case "/names":
                sent = request.headers.get("Cookie", "").split("; ")
                _answer(request, " ".join(sorted(each.partition("=")[0] for each in sent)))
            case _:
                _answer(request, "not here", 404)

    def post(self, request: http.server.BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length", 0))
        form = parse_qs(request.rfile.read(length).decode())
        with self._lock:
            self.tries += 1
        if form.get("user") != [USER] or form.get("password") != [PASSWORD]:
            _answer(request, FORM)
            return
        sid = secrets.token_hex(16)
        with self._lock:
            if not self.forgetful:
                self.sids.add(sid)
            self.logins += 1
        request.send_response(303)
        request.send_header("Set-Cookie", f"sid={sid}; Path=/; HttpOnly; Max-Age=3600")
        request.send_header("Set-Cookie", "theme=dark; Path=/")
        request.send_header("Location", "/account")
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _knows(self, request: http.server.BaseHTTPRequestHandler) -> bool:
        cookies = SimpleCookie(request.headers.get("Cookie", ""))
        known = "sid" in cookies and cookies["sid"].value in self.sids
        with self._lock:
            self.refused += not known
        return known

    def _account(self, request: http.server.BaseHTTPRequestHandler) -> None:
        if not self._knows(request):
            request.send_response(302)
            request.send_header("Location", "/login")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        _answer(request, ACCOUNT.format(user=USER))
        with self._lock:
            self.inside -= 1


def _answer(
    request: http.server.BaseHTTPRequestHandler,
    text: str,
    status: int = 200,
    *,
    strict: bool = False,
    cookies: Iterable[str] = (),
) -> None:
    body = text.encode()
    if strict and text == "no":
        status = 401
    request.send_response(status)
    request.send_header("Content-Type", "text/html; charset=utf-8")
    for each in cookies:
        request.send_header("Set-Cookie", each)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


@contextmanager
def login_site() -> Iterator[LoginSite]:
    site = LoginSite()
    thread = threading.Thread(target=site.server.serve_forever)
    thread.start()
    try:
        yield site
    finally:
        site.server.shutdown()
        thread.join()
        site.server.server_close()
