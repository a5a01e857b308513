"""Telegram's Bot API on loopback, as far as bots need it that get and send messages."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

TOKEN = "42:a-token-of-this-test"
POLL_SECONDS = 0.5  # a question for updates waits so long at most, whatever the bot asks for
ME = {"id": 42, "is_bot": True, "first_name": "Kites", "username": "kites_bot"}
ADA = {"id": 7, "is_bot": False, "first_name": "Ada"}


class BotApi:
    """People write and press buttons; what the bot sends them is in `sent`."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []  # messages of the bot
        self.answered: list[dict[str, Any]] = []  # presses of buttons that the bot has answered
        self._updates: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._number = 0
        self._over = False
        here = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                kind = self.headers.get("Content-Type", "")
                given = json.loads(body) if "json" in kind else dict(parse_qsl(body))
                result = here._answer(self.path, given)
                said = json.dumps({"ok": True, "result": result}).encode()
                with suppress(OSError):  # a bot that has ended
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    # -- people ---------------------------------------------------------------------------------

    def write(self, chat: int, text: str) -> None:
        """Have a person write to the bot."""
        command = len(text.split(maxsplit=1)[0])
        entities = [{"type": "bot_command", "offset": 0, "length": command}]
        self._tell("message", {**self._message(chat, text, ADA), "entities": entities})

    def press(self, message: dict[str, Any]) -> None:
        """Have a person press the only button of a message of the bot."""
        [[button]] = message["reply_markup"]["inline_keyboard"]
        self._tell(
            "callback_query",
            {
                "id": "1",
                "from": ADA,
                "chat_instance": "1",
                "message": {key: message[key] for key in message if key != "reply_markup"},
                "data": button["callback_data"],
            },
        )

    def texts(self, chat: int) -> list[str]:
        """Return what the bot has sent to a chat."""
        return [each["text"] for each in self.sent if each["chat"]["id"] == chat]

    # -- the bot ----------------------------------------------------------------------------------

    def _answer(self, path: str, given: dict[str, Any]) -> Any:
        prefix, _, method = path.partition("?")[0].rpartition("/")
        assert prefix == f"/bot{TOKEN}", path
        match method.lower():
            case "getme":
                return ME
            case "getupdates":
                return self._poll(given)
            case "sendmessage":
                return self._send(given)
            case "answercallbackquery":
                self.answered.append(given)
        return True

    def _poll(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        first = int(given.get("offset") or 0)

        def new() -> list[dict[str, Any]]:
            return [each for each in self._updates if each["update_id"] >= first]

        with self._news:
            self._news.wait_for(lambda: new() or self._over, POLL_SECONDS)
            return new()

    def _send(self, given: dict[str, Any]) -> dict[str, Any]:
        message = self._message(int(given["chat_id"]), given["text"], ME)
        if markup := given.get("reply_markup"):
            message["reply_markup"] = json.loads(markup) if isinstance(markup, str) else markup
        self.sent.append(message)
        return message

    def _message(self, chat: int, text: str, sender: dict[str, Any]) -> dict[str, Any]:
        with self._news:
            self._number += 1
            return {
                "message_id": self._number,
                "date": 1_700_000_000,
                "chat": {"id": chat, "type": "private"},
                "from": sender,
                "text": text,
            }

    def _tell(self, kind: str, what: dict[str, Any]) -> None:
        with self._news:
            self._updates.append({"update_id": len(self._updates) + 1, kind: what})
            self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
