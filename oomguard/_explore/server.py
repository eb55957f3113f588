"""The page of the explorer, served on loopback. Its address has a random token, and nothing leaves the machine."""

import base64
import hashlib
import json
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader

from oomguard._core.errors import MisuseError
from oomguard._explore.explorer import Explorer, Settings
from oomguard._report.page import STYLE

FOLDER = Path(__file__).parent
HOST = "127.0.0.1"
MOST_BYTES = 1 << 16  # of a request
MISSING = MisuseError(
    rule="oomguard explore needs the packages starlette and uvicorn",
    got="they are not installed",
    advice="Run pip install 'oomguard[explore]'.",
)


@cache
def script() -> str:
    """The code of one explorer, for pages and notebooks."""
    return (FOLDER / "explore.js").read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style of one explorer."""
    return (FOLDER / "explore.css").read_text(encoding="utf-8")


def page(explorer: Explorer) -> tuple[str, str]:
    """The page, and the policy that lets a browser run its own script alone and ask only this server."""
    code = script() + (FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; connect-src 'self'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    data = {"controls": explorer.controls(), "settings": explorer.settings, "probes": explorer.probes}
    text = json.dumps(data).replace("<", "\\u003c")
    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html.j2")
    whole = template.render(style=STYLE.read_text(encoding="utf-8") + style(), script=code, data=text)
    return whole, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def make_app(explorer: Explorer, token: str) -> Any:
    """The ASGI application. Requests without the token, or for another host, are not answered."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, JSONResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise MISSING from None
    text, policy = page(explorer)
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

    async def show(_: Request) -> Response:
        return HTMLResponse(text, headers=headers | {"Referrer-Policy": "no-referrer"})

    def replying(reply: Callable[[Settings], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            if request.headers.get("content-type") != "application/json":  # other pages cannot send that
                return JSONResponse({"error": "JSON is needed."}, 415)
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return JSONResponse({"error": "The request is too long."}, 413)
            try:
                settings = msgspec.json.decode(body, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return JSONResponse({"error": "The request is not JSON."}, 400)
            return JSONResponse(await run_in_threadpool(reply, settings), headers={"Cache-Control": "no-store"})

        return endpoint

    routes = [
        Route(f"/{token}/", show),
        Route(f"/{token}/answer", replying(explorer.answer), methods=["POST"]),
        Route(f"/{token}/measure", replying(explorer.measure), methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])])


def serve(explorer: Explorer, port: int = 0, ready: Callable[[str], None] = print) -> None:
    """Serve the page until Ctrl-C. `ready` gets its address. Port 0 is any free one."""
    token = secrets.token_urlsafe(16)
    app = make_app(explorer, token)
    try:
        import socket

        import uvicorn
    except ImportError:
        raise MISSING from None
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise MisuseError(
            rule=f"The explorer needs a free port on {HOST}",
            got=f"--port {port} cannot be used ({error.strerror or error})",
            advice="Give another --port, or leave it out.",
        ) from None
    with listener:
        ready(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])
