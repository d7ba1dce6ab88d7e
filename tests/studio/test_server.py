"""Requests: which are answered, which are refused, and with what words."""

import json

import pytest

from fmwc.errors import OutputError
from fmwc.studio.server import BODY, HOST, Events, finite
from tests.studio.shared import serving

PAGES = ["/", "/web/studio/studio.js", "/web/components.css"]


# ---- safety ----------------------------------------------------------------------------------------------------------


def test_only_this_machine_can_connect(studio):
    assert studio.served.listener.getsockname()[0] == HOST == "127.0.0.1"


@pytest.mark.parametrize("path", PAGES)
def test_pages_need_no_token_and_load_nothing_from_elsewhere(studio, path):
    answer = studio.request("GET", path, Cookie=None)
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_all_data_need_the_token(studio):
    routes = [route for route in studio.served.server.config.app.routes if route.path.startswith("/api/")]
    assert len(routes) > 15
    for route in routes:
        path = (
            route.path.format(run="0" * 12, sample=0, job="0", name="0")
            if "{sample:int}" not in route.path
            else "/api/runs/0/samples/0"
        )
        for method in route.methods:
            for token in (None, "", studio.token[:-1], studio.token + "x", "ä"):
                cookie = token and studio.cookie(token).encode().decode("latin-1")
                answer = studio.request(method, path, Cookie=cookie)
                assert answer.status == 401, (method, path)
                assert method == "HEAD" or "the whole address" in answer.error


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/events",
        "/web/dom.js",
    ],
)
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1:{port}.evil.example",
        "localhost.evil.example:{port}",
        "",
    ],
)
def test_other_hosts_are_refused(studio, path, host):
    answer = studio.request("GET", path, Host=host.format(port=studio.host.partition(":")[2]))
    assert answer.status == 421


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "https://127.0.0.1:{port}",
        "http://127.0.0.1:1",
        "http://127.0.0.1:{port}@evil.example",
        "file://",
        "",
    ],
)
def test_other_origins_are_refused(studio, origin):
    origin = origin.format(port=studio.host.partition(":")[2])
    for method, path in (("GET", "/"), ("POST", "/api/runs"), ("DELETE", "/api/runs/0")):
        assert studio.request(method, path, {} if method == "POST" else None, Origin=origin).status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/web/../studio/server.py",
        "/web/%2e%2e/studio/server.py",
        "/web/..%2fstudio/server.py",
        "/web//etc/passwd",
        "/web/%2fetc/passwd",
        "/api/exports/..%2f..%2frun.json",
        "/api/exports/../../run.json",
        "/api/runs/..%2f..",
        "/api/runs/%2e%2e/samples",
        "/api/runs/x/samples/-1",
        "/api/runs/x/samples/1e9",
    ],
)
def test_paths_stay_inside(studio, path):
    assert studio.request("GET", path).status in (404, 405)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{" + b" " * BODY + b"}", "larger than"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 20_000, ""),
        (b'{"options": NaN}', ""),
    ],
)
def test_bodies_are_checked(studio, body, words):
    answer = studio.ask("POST", "runs", body)
    assert answer.status == 400
    assert words in answer.error


# ---- events ----------------------------------------------------------------------------------------------------------


def test_two_pages_hear_the_same_events(studio):
    studio.ready("checkerboard")
    with studio.events() as one, studio.events() as other:
        for events in (one, other):
            assert next(events)[0] == "state"
        made = studio.post("runs", {"field": "checkerboard", "options": {"count": 5, "steps": 3, "seed": 77}})
        for events in (one, other):
            heard = []
            for name, data in events:
                if made["run"]["id"] in (data.get("run"), data.get("id")):  # not a model that is still being loaded
                    heard.append((name, data.get("state")))
                    if heard[-1] == ("job", "done"):
                        break
            assert [*dict.fromkeys(state for name, state in heard if name == "run")] == [
                "waiting",
                "drawing",
                "judging",
                "done",
            ]
            assert ("preview", None) in heard
            assert heard.index(("run", "done")) < heard.index(("job", "done"))


def test_events_hold_no_value_that_is_not_json():
    data = {"left": float("nan"), "list": [float("inf"), 1.5, {"deep": (float("-inf"), "x")}]}
    assert finite(data) == {"left": None, "list": [None, 1.5, {"deep": [None, "x"]}]}
    json.dumps(finite(data), allow_nan=False)
    Events().tell("job", data)  # without a page, nothing happens


# ---- starting --------------------------------------------------------------------------------------------------------


def test_a_second_start_on_the_same_folder_says_so(tmp_path):
    with (
        serving(tmp_path / "studio"),
        pytest.raises(OutputError, match="in use"),
        serving(tmp_path / "studio"),
    ):
        pass
