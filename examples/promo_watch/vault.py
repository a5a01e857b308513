"""How to log in to vault. Called when nobody is logged in, and never by two tasks at once."""

from typing import Any
from urllib.parse import urlencode

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


async def log_in(session: Any, url: str, user: str, password: str) -> None:
    body = urlencode({"user": user, "password": password})
    await session.worker.fetch(session.ctx, url, method="POST", headers=FORM, body=body)
