"""A studio that runs in a thread, and requests to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import load

from fmwc.cli.verbs import Studio as Options
from fmwc.studio.server import Served, opened

PATIENCE = 120  # seconds


class Answer:
    """An answer of the server."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.content = answer.status, answer.headers, answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def tensors(self) -> Any:
        return load(self.content)

    @property
    def error(self) -> str:
        assert self.status >= 400
        return self.json["error"]


class Client:
    """Requests of a page.

    Arguments:
        address: The address of the studio, which makes a browser known.
    """

    def __init__(self, address: str, served: Served | None = None) -> None:
        self.address, self.served = address, served
        base, _, self.token = address.partition("/open/")
        self.host = base.removeprefix("http://")
        self.pages = base

    def cookie(self, token: str) -> str:
        return f"fmwc-{self.host.partition(':')[2]}={token}"

    def request(self, method: str, path: str, body: Any = None, **headers: str | None) -> Answer:
        """Send a request with any headers; `None` leaves out one that pages send."""
        sent = {"Cookie": self.cookie(self.token), **{name.replace("_", "-"): text for name, text in headers.items()}}
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        connection.request(method, path, content, {name: text for name, text in sent.items() if text is not None})
        try:
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        return self.request(method, f"/api/{path}", body)

    def get(self, path: str) -> Any:
        return self._good(self.ask("GET", path)).json

    def post(self, path: str, body: Any = None) -> Any:
        return self._good(self.ask("POST", path, body or {})).json

    def tensors(self, path: str) -> Any:
        return self._good(self.ask("GET", path)).tensors

    def _good(self, answer: Answer) -> Answer:
        assert answer.status == 200, answer.content
        return answer

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """Connect to the events; yields an iterator of their names and data."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        connection.request("GET", "/api/events", headers={"Cookie": self.cookie(self.token)})
        answer = connection.getresponse()
        assert answer.status == 200

        def each() -> Iterator[tuple[str, Any]]:
            name = ""
            while line := answer.readline().decode().rstrip("\n"):
                field, _, text = line.partition(": ")
                if field == "event":
                    name = text
                elif field == "data":
                    yield name, json.loads(text)
                    answer.readline()  # the empty line

        try:
            yield each()
        finally:
            connection.close()

    def state(self) -> Any:
        with self.events() as events:
            return next(events)[1]

    def finished(self, job: Any, state: str = "done") -> Any:
        """Wait until a job has ended; it must have ended in this state."""
        busy = ("waiting", "running")
        job = self.until(lambda: (found := self._job(job))["state"] not in busy and found)
        assert job["state"] == state, job
        return job

    def working(self, job: Any, share: float = 1e-6) -> Any:
        """Return a job if at least this share is finished."""
        found = self._job(job)
        return found if found["share"] >= share else None

    def _job(self, job: Any) -> Any:
        return next(one for one in self.state()["jobs"] if one["id"] == job["id"])

    def until(self, look: Any) -> Any:
        """Call a function until it returns something true, and return that."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := look():
                return found
            time.sleep(0.02)
        raise AssertionError("nothing happened for too long")

    def ready(self, field: str) -> Any:
        """Wait until the weights of a model are loaded; return the model."""
        return self.until(lambda: next((f for f in self.state()["fields"] if f["name"] == field and f["ready"]), None))

    def draw(self, field: str = "checkerboard", **options: Any) -> Any:
        """Draw a run and wait for it."""
        self.ready(field)
        made = self.post("runs", {"field": field, "options": {"count": 30, "steps": 5, **options}})
        self.finished(made["job"])
        return self.get(f"runs/{made['run']['id']}")

    def edit(self, run: Any, sample: int, **options: Any) -> Any:
        """Edit a sample and wait for it."""
        made = self.post(f"runs/{run['id']}/samples/{sample}/edits", {"at": 0.4, **options})
        self.finished(made["job"])
        return self.get(f"runs/{made['run']['id']}")

    def trace(self, run: Any, sample: int) -> Any:
        """Return the path of a sample."""
        asked = self.post(f"runs/{run['id']}/samples/{sample}/trace")
        if not asked["ready"]:
            self.finished(asked["job"])
        return self.tensors(f"runs/{run['id']}/samples/{sample}/trace")


@contextmanager
def serving(out: Path, what: str = "checkerboard", **options: Any) -> Iterator[Client]:
    """Run a studio in a thread."""
    with opened(Options(what, out, 0, **{"browser": False, "device": "cpu", **options})) as served:
        thread = threading.Thread(target=served.server.run, args=([served.listener],))
        thread.start()
        try:
            client = Client(served.address, served)
            client.until(lambda: served.server.started)
            yield client
        finally:
            served.server.should_exit = True
            thread.join(PATIENCE)
