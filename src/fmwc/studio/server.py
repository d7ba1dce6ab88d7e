"""The server of the studio: pages, JSON, and server-sent events on the loopback interface.

Only pages of this server can use it: other `Host` and `Origin` headers are refused, and every request for data needs
the cookie that the address sets which `fmwc studio` prints. The browser that it opens gets an address of its own that
works once, because other users can see the command line of a process. The page names runs by their IDs, never by paths.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request, cookie_parser
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fmwc.checkpoint import shipped
from fmwc.cli.verbs import Studio as Options
from fmwc.errors import FmwcError, UsageError
from fmwc.files import locked
from fmwc.provenance import pick_device
from fmwc.readers import parse_json, shown
from fmwc.registry import DOMAINS
from fmwc.studio.models import Model
from fmwc.studio.recipe import recipe
from fmwc.studio.runs import Missing, Studio

__all__ = ["Events", "Served", "Server", "create_app", "opened", "serve"]

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
BODY = 64 << 10  # bytes of a request
HEARTBEAT = 15.0  # seconds between comments on a quiet stream of events
BACKLOG = 1_000  # events that a page may lag behind
PATIENCE = 10.0  # seconds for the headers of a request
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


# ---- safety ----------------------------------------------------------------------------------------------------------


UNKNOWN = "this browser is not known; open the whole address that fmwc studio printed in its terminal"


def cookie_of(port: int) -> str:
    """Return the name of the cookie that holds the token. Cookies do not distinguish ports."""
    return f"fmwc-{port}"


class Keys:
    """The addresses that make a browser known.

    Attributes:
        token: The secret of the printed address and of the cookie.
        once: Secrets of addresses that work once.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)
        self.once: set[str] = set()

    def new(self) -> str:
        """Return a secret that works once."""
        self.once.add(key := secrets.token_urlsafe(24))
        return key

    def use(self, key: str) -> bool:
        """Return whether a secret is valid."""
        if key in self.once:
            self.once.discard(key)
            return True
        return secrets.compare_digest(key.encode(), self.token.encode())


class Guard:
    """Refuses requests that do not come from a page of this server, and bodies that are too large.

    Arguments:
        app: The application.
        port: The port of the server.
        token: The secret that requests for data must carry.
    """

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self.app, self.token, self.cookie = app, token, cookie_of(port)
        self.hosts = {f"{name}:{port}" for name in NAMES} | ({*NAMES} if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if problem := self.problem(scope["path"], headers):
            await _refusal(*problem)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), text.encode()) for name, text in HEADERS.items()]
            await send(message)

        await self.app(scope, receive, with_headers)

    def problem(self, path: str, headers: Headers) -> tuple[str, int] | None:
        """Return why a request is refused, and the status; `None` if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return "this server answers only requests to 127.0.0.1 and localhost", 421
        if origin is not None and origin.removeprefix("http://") not in self.hosts:
            return "this server answers only its own pages", 403
        if not path.startswith("/api/"):
            return None
        given = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        if not secrets.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return UNKNOWN, 401
        return None


def _refusal(error: str, status: int, control: str = "") -> JSONResponse:
    return JSONResponse({"error": error, "control": control}, status)


async def _refused(request: Request, error: Exception) -> Response:
    """Answer an error of the library with its message."""
    return _refusal(str(error), 404 if isinstance(error, Missing) else 400, getattr(error, "control", ""))


async def body_of(request: Request) -> Any:
    """Return the JSON object in the body of a request; raise if it is too large or something else."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > BODY:
            raise UsageError(f"the request is larger than {BODY:,} bytes")
    try:
        found = parse_json(content.decode() or "{}", "the request", UsageError)
    except UnicodeDecodeError as error:
        raise UsageError("the request is not UTF-8 text") from error
    if not isinstance(found, dict):
        raise UsageError("the request must be a JSON object")
    return found


# ---- events ----------------------------------------------------------------------------------------------------------


class Events:
    """Passes events from any thread to all pages.

    Attributes:
        state: Returns the data of a `state` event, which every stream begins with.
    """

    def __init__(self) -> None:
        self.state: Callable[[], Any] = dict
        self.streams: dict[asyncio.Queue[str | None], asyncio.AbstractEventLoop] = {}

    def tell(self, name: str, data: Any) -> None:
        """Publish an event. The data of `state` are :attr:`state`."""
        if self.streams:
            text = encoded(name, self.state() if name == "state" else data)
            for queue, loop in [*self.streams.items()]:
                loop.call_soon_threadsafe(self._put, queue, text)

    def close(self) -> None:
        """End all streams."""
        for queue, loop in [*self.streams.items()]:
            loop.call_soon_threadsafe(self._put, queue, None)

    def _put(self, queue: asyncio.Queue[str | None], text: str | None) -> None:
        if queue.qsize() >= BACKLOG:  # the page stopped reading; it connects again
            self.streams.pop(queue, None)
            text = None
        queue.put_nowait(text)

    async def stream(self) -> AsyncIterator[str]:
        """Yield the current state, then events as they happen."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.streams[queue] = asyncio.get_running_loop()
        try:
            yield encoded("state", await run_in_threadpool(self.state))
            while True:
                try:
                    text = await asyncio.wait_for(queue.get(), HEARTBEAT)
                except asyncio.TimeoutError:
                    text = ":\n\n"
                if text is None:
                    return
                yield text
        finally:
            self.streams.pop(queue, None)


def encoded(name: str, data: Any) -> str:
    """Return a server-sent event.

    >>> encoded("job", {"id": 1})
    'event: job\\ndata: {"id": 1}\\n\\n'
    """
    return f"event: {name}\ndata: {json.dumps(finite(data))}\n\n"


def finite(value: Any) -> Any:
    """Return JSON data with null instead of NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- requests --------------------------------------------------------------------------------------------------------


def create_app(studio: Studio, events: Events, port: int, keys: Keys) -> Starlette:
    """Return the application.

    Arguments:
        studio: The models and runs.
        events: Where the studio publishes its changes.
        port: The port of the server.
        keys: The secrets in its addresses.
    """
    run_of = lambda request: studio.run(request.path_params["run"])  # noqa: E731
    sample_of = lambda request: request.path_params["sample"]  # noqa: E731
    started = lambda run, job: {"run": studio.shown(run), "job": studio.worker.shown(job)}  # noqa: E731
    working = lambda job: {"job": studio.worker.shown(job)}  # noqa: E731

    def trace(request: Request, _: Any) -> Any:
        job = studio.trace(run_of(request), sample_of(request))
        return {"ready": True} if job is None else {"ready": False, **working(job)}

    def promise(request: Request, _: Any) -> Any:
        try:
            asked = [float(request.query_params[name]) for name in ("max_risk", "probability")]
        except (KeyError, ValueError) as error:
            raise UsageError("give max_risk and probability as numbers between 0 and 1") from error
        return studio.promise(run_of(request), *asked)

    def one_run(request: Request, _: Any) -> Any:
        run = run_of(request)
        return {**studio.shown(run), "pair": run.pair}

    def preview(request: Request, _: Any) -> bytes:
        found = studio.previews.get(run_of(request).id)
        return b"" if found is None else found.tensors()

    def exported(request: Request, _: Any) -> Response:
        path = studio.exported(request.path_params["name"])
        return FileResponse(path, media_type="application/zip", filename=path.name)

    # What each request does: its method, its path, and a function of the request and its body.
    table: list[tuple[str, str, Callable[[Request, Any], Any]]] = [
        ("POST", "runs", lambda _, body: started(*studio.draw(str(body.get("field")), body.get("options")))),
        ("GET", "runs/{run}", one_run),
        ("DELETE", "runs/{run}", lambda request, _: studio.delete(run_of(request))),
        ("POST", "runs/{run}/again", lambda request, _: started(*studio.again(run_of(request)))),
        ("GET", "runs/{run}/samples", lambda request, _: studio.content(run_of(request)).tensors()),
        ("GET", "runs/{run}/table", lambda request, _: studio.content(run_of(request)).page_table()),
        ("GET", "runs/{run}/preview", preview),
        ("GET", "runs/{run}/promise", promise),
        ("POST", "runs/{run}/recipe", lambda request, body: recipe(studio, run_of(request), body.get("kept"))),
        ("POST", "runs/{run}/export", lambda request, body: working(studio.export(run_of(request), body.get("kept")))),
        (
            "GET",
            "runs/{run}/samples/{sample:int}",
            lambda request, _: studio.about(run_of(request), sample_of(request)),
        ),
        ("POST", "runs/{run}/samples/{sample:int}/trace", trace),
        ("GET", "runs/{run}/samples/{sample:int}/trace", lambda r, _: studio.trace_file(run_of(r), sample_of(r))),
        (
            "POST",
            "runs/{run}/samples/{sample:int}/edits",
            lambda r, b: started(*studio.edit(run_of(r), sample_of(r), b)),
        ),
        ("POST", "jobs/{job}/cancel", lambda r, _: studio.worker.cancel(studio.job(r.path_params["job"]))),
        ("GET", "exports/{name}", exported),
    ]

    async def stream(request: Request) -> Response:
        return StreamingResponse(events.stream(), media_type="text/event-stream")

    async def enter(request: Request) -> Response:
        if not keys.use(request.path_params["key"]):
            return PlainTextResponse(f"{UNKNOWN[0].upper()}{UNKNOWN[1:]}.", 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(cookie_of(port), keys.token, httponly=True, samesite="strict")
        return answer

    web = Path(str(files("fmwc") / "web"))
    page = Route("/", lambda request: FileResponse(web / "studio.html"))
    routes = [Route(f"/api/{path}", _endpoint(act), methods=[method]) for method, path, act in table]
    static = Mount("/web", StaticFiles(directory=web))
    guard = Middleware(Guard, port=port, token=keys.token)
    return Starlette(
        routes=[page, Route("/open/{key}", enter), Route("/api/events", stream), *routes, static],
        middleware=[guard],
        exception_handlers={FmwcError: _refused, OSError: _refused},
    )


def _endpoint(act: Callable[[Request, Any], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that runs a function in a thread and answers with JSON, or with bytes."""

    async def answer(request: Request) -> Response:
        body = await body_of(request) if request.method == "POST" else {}
        found = await run_in_threadpool(act, request, body)
        if isinstance(found, Response):
            return found
        if isinstance(found, bytes):
            return Response(found, media_type="application/octet-stream")
        return Response(json.dumps(finite(found if found is not None else {})), media_type="application/json")

    return answer


# ---- the server ------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """A studio that is ready to answer requests.

    Attributes:
        address: The address that makes a browser known.
        token: The secret of its cookie.
        studio: The models and runs.
        server: The server.
        listener: The socket to pass to `server.run`.
    """

    address: str
    token: str
    studio: Studio
    server: Server
    listener: socket.socket


def serve(options: Options, say: Callable[[str], None] = print) -> None:
    """Serve the studio until it is interrupted."""
    with opened(options) as (address, _, _, server, listener), suppress(KeyboardInterrupt):
        say(f"fmwc studio: {address}")
        say(f"runs are kept in {shown(options.out)}; press Ctrl-C to stop")
        server.run([listener])


@contextmanager
def opened(options: Options) -> Iterator[Served]:
    """Open the port, the folder and the models of a studio; close them at the end."""
    device = pick_device(options.device)
    with closing(_listen(options.port)) as listener, locked(options.out):
        port, keys, events = listener.getsockname()[1], Keys(), Events()
        studio = _studio(options, device, events)
        try:
            address = f"http://{HOST}:{port}/open/"
            app = create_app(studio, events, port, keys)
            config = uvicorn.Config(app, http=Patient, log_level="warning", timeout_graceful_shutdown=3, lifespan="off")
            server = Server(config, events, address + keys.new() if options.browser else "")
            yield Served(address + keys.token, keys.token, studio, server, listener)
        finally:
            studio.close()


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface; raise if the port is in use."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} is in use, perhaps by another fmwc studio ({error.strerror}); use that one, or choose "
            "another --port"
        ) from error
    return listener


def _studio(options: Options, device: Any, events: Events) -> Studio:
    """Return the studio with the shipped models, and the model or the samples that were named."""
    models = [Model(name, name, device, judge=options.judge if name == options.what else "") for name in DOMAINS]
    path, what = Path(options.what), options.what
    samples = what not in shipped() and (path.is_file() or (path / "samples.safetensors").is_file())
    if what and what not in DOMAINS and not samples:
        name = path.resolve().name if path.is_dir() else what
        taken = {model.name for model in models}
        name = f"{name}-2" if name in taken else name
        models.insert(0, Model(name, what, device, options.network, options.judge))
        models[0].opened  # noqa: B018 raises now if this is not a checkpoint
        what = name
    studio = Studio(options.out, models, events.tell)
    events.state = studio.state
    if samples:
        try:
            what = studio.open_samples(path, device).id
        except BaseException:
            studio.close()
            raise
    studio.start = what
    return studio


class Patient(H11Protocol):
    """Closes connections whose request has not arrived with all its headers after some seconds."""

    waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _wait(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are here
            self._stop()
        elif self.waiting is None:
            self.waiting = self.loop.call_later(PATIENCE, self._late)

    def _stop(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None

    def _late(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.close()


class Server(uvicorn.Server):
    """Ends the streams of events before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, events: Events, address: str) -> None:
        super().__init__(config)
        self.events, self.address = events, address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.address:
            await run_in_threadpool(webbrowser.open, self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.events.close()
        await super().shutdown(sockets)
