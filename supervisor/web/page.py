"""The files of the dashboard: read once; they load nothing from other servers."""

import hashlib
from importlib.resources import files

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts and styles only from our own files, no markup from strings, no forms, no frames.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


class _File(Struct, frozen=True):
    content: bytes
    kind: str
    mark: str  # ETag


def routes() -> list[Route]:
    """Return routes for `/` and for the files that the page loads."""
    found = []
    for each in files("musterd.supervisor.web").joinpath("static").iterdir():
        ending = each.name.rpartition(".")[2]
        if ending in KINDS:
            content = each.read_bytes()
            mark = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            path = "/" if each.name == "index.html" else f"/static/{each.name}"
            found.append(_route(path, _File(content, KINDS[ending], mark)))
    return found


def _route(path: str, file: _File) -> Route:
    headers = {"etag": file.mark, "cache-control": "no-cache", "content-security-policy": POLICY}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.mark:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.kind)

    return Route(path, serve)
