"""Who may ask the viewer: nobody without the token, no other Host or Origin, nobody who climbs out of its folder."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from archive.base import UsageError
from archive.view import Settings, Viewer, serve
from tests.support.shown import looked_at

LABEL = json.dumps({"labels": {"e0": {"success": True}}})


class Answer(NamedTuple):
    status: int
    body: str
    headers: dict[str, str]


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    arc = looked_at(str(tmp_path_factory.mktemp("guard") / "arc"), episodes=2, steps=3)
    with serve(arc) as running:
        yield running


def _asked(viewer: Viewer, path: str, *, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
    host, _, port = viewer.origin.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": f"{host}:{port}", "Content-Length": str(len(body or "")), **given}.items():
        connection.putheader(name, value)
    connection.endheaders((body or "").encode())
    answer = connection.getresponse()
    found = Answer(
        answer.status, answer.read().decode("utf-8", "replace"), {k.lower(): v for k, v in answer.getheaders()}
    )
    connection.close()
    return found


def _token(viewer: Viewer) -> str:
    return viewer.url.partition("token=")[2]


def _cookie(viewer: Viewer) -> str:
    """What a browser that was let in sends to all ports of the host."""
    return _asked(viewer, f"/?token={_token(viewer)}").headers["set-cookie"].partition(";")[0]


def _bearer(viewer: Viewer) -> dict[str, str]:
    return {"Authorization": f"Bearer {_token(viewer)}"}


def test_with_the_token_everything_answers(viewer: Viewer) -> None:
    page = _asked(viewer, f"/?token={_token(viewer)}")
    assert page.status == 200
    assert _token(viewer) in page.body
    assert _asked(viewer, "/api/about", **_bearer(viewer)).status == 200


def test_the_cookie_opens_the_page_again_and_nothing_else(viewer: Viewer) -> None:
    """Browsers send it to every port of the host, whoever listens there."""
    cookie = _asked(viewer, f"/?token={_token(viewer)}").headers["set-cookie"]
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
    assert _token(viewer) not in cookie
    again = _asked(viewer, "/", Cookie=cookie.partition(";")[0])
    assert (again.status, "set-cookie" in again.headers) == (200, False)
    assert _token(viewer) not in again.body
    for path, method in (("/api/about", "GET"), ("/api/episodes", "GET"), ("/api/labels", "POST")):
        answer = _asked(viewer, path, method=method, body=LABEL, Cookie=cookie, Sec_Fetch_Site="same-origin")
        assert answer.status == 403
    secret = cookie.partition("=")[2].partition(";")[0]
    assert _asked(viewer, f"/?token={secret}").status == 403
    assert _asked(viewer, "/api/about", Authorization=f"Bearer {secret}").status == 403


def test_a_code_opens_the_page_once(viewer: Viewer) -> None:
    once = viewer.url_once().removeprefix(viewer.origin)
    assert _token(viewer) not in once
    assert _asked(viewer, once.replace("/?", "/api/about?")).status == 403
    assert _asked(viewer, once, method="HEAD").status == 403
    assert _asked(viewer, once, Host="evil.example").status == 421
    page = _asked(viewer, once)
    assert (page.status, _token(viewer) in page.body) == (200, True)
    assert _asked(viewer, once).status == 403
    assert _asked(viewer, "/", Cookie=page.headers["set-cookie"].partition(";")[0]).status == 200
    assert _asked(viewer, "/?code=").status == 403


@pytest.mark.parametrize(
    "path", ["/", "/api/about", "/api/episodes", "/api/nothing", "/?token=", "/?token=wrong", "/api/about?token=x"]
)
def test_without_the_token_nothing_does(viewer: Viewer, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {_token(viewer)}"},
        {"Cookie": f"{_cookie(viewer).partition('=')[0]}=wrong"},
    ):
        answer = _asked(viewer, path, **headers)
        assert answer.status == 403
        assert "token" in answer.body
        assert "e0" not in answer.body


def test_the_token_in_an_address_opens_the_first_page_alone(viewer: Viewer) -> None:
    assert _asked(viewer, f"/api/about?token={_token(viewer)}").status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost:80", ""])
def test_another_host_is_refused(viewer: Viewer, host: str) -> None:
    answer = _asked(viewer, f"/?token={_token(viewer)}", Host=host)
    assert answer.status in (400, 421)
    assert _token(viewer) not in answer.body


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"])
def test_another_origin_is_refused(viewer: Viewer, origin: str) -> None:
    assert _asked(viewer, "/api/about", Origin=origin, **_bearer(viewer)).status == 403
    assert _asked(viewer, "/api/labels", method="POST", body=LABEL, Origin=origin, **_bearer(viewer)).status == 403
    assert _asked(viewer, "/api/about", Origin=viewer.origin, **_bearer(viewer)).status == 200


def test_another_sites_page_is_refused_even_with_the_token(viewer: Viewer) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert _asked(viewer, "/api/about", Sec_Fetch_Site=site, **_bearer(viewer)).status == status


@pytest.mark.parametrize(
    ("referer", "framer"),
    [
        ("http://localhost:8888/lab/tree", "http://localhost:8888"),
        ("https://127.0.0.1:9999/", "https://127.0.0.1:9999"),
        ("http://[::1]:80/", "http://[::1]:80"),
        ("http://localhost.evil.example:8888/", "'none'"),
        ("http://localhost:x;script-src%20*/", "'none'"),
        ("file://localhost/", "'none'"),
        ("", "'none'"),
    ],
)
def test_the_page_that_asks_with_the_token_may_frame_it_and_no_other(viewer: Viewer, referer: str, framer: str) -> None:
    opened = _asked(viewer, f"/?token={_token(viewer)}", Referer=referer)
    by_cookie = _asked(viewer, "/", Referer=referer, Cookie=_cookie(viewer))
    for answer, said in ((opened, framer), (by_cookie, "'none'")):
        assert answer.headers["content-security-policy"].endswith(f"; frame-ancestors {said}")


@pytest.mark.parametrize(
    "path",
    [
        "/app/../routes.py",
        "/app/%2e%2e/routes.py",
        "/app/..%2froutes.py",
        "/app//etc/passwd",
        "/app/%2fetc/passwd",
        "/app/",
    ],
)
def test_no_path_leads_out_of_the_folder(viewer: Viewer, path: str) -> None:
    answer = _asked(viewer, path, **_bearer(viewer))
    assert answer.status in (403, 404, 405)
    assert "import" not in answer.body


def test_answers_say_what_a_browser_may_do_with_them(viewer: Viewer) -> None:
    for path in ("/", "/api/about", "/app/main.js"):
        headers = _asked(viewer, path, **_bearer(viewer)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert _asked(viewer, "/api/about", **_bearer(viewer)).headers["cache-control"] == "no-store"


def test_a_change_is_refused_where_nobody_may_write(viewer: Viewer, archive_url: str) -> None:
    with serve(looked_at(archive_url, 2, 3), settings=Settings(read_only=True)) as locked:
        answer = _asked(locked, "/api/labels", method="POST", body=LABEL, **_bearer(locked))
        assert answer.status == 400
        assert "read-only" in json.loads(answer.body)["error"]
    assert _asked(viewer, "/api/labels", method="DELETE", **_bearer(viewer)).status == 405


def test_a_body_that_is_too_long_is_not_read(viewer: Viewer) -> None:
    answer = _asked(viewer, "/api/labels", method="POST", body="x" * (5 * 1024 * 1024), **_bearer(viewer))
    assert answer.status == 413


def test_errors_are_json_that_says_what(viewer: Viewer) -> None:
    answer = _asked(viewer, "/api/episodes?where=return+%3E", **_bearer(viewer))
    assert answer.status == 400
    assert "condition" in json.loads(answer.body)["error"]
    assert _asked(viewer, "/api/episode?id=nobody", **_bearer(viewer)).status == 404


def test_a_port_that_is_taken_is_an_error_that_says_so(viewer: Viewer, archive_url: str) -> None:
    port = int(viewer.origin.rpartition(":")[2])
    with pytest.raises(UsageError, match="port="):
        serve(looked_at(archive_url, 2, 3), port=port)


def test_the_token_is_not_in_what_is_printed_of_it(viewer: Viewer) -> None:
    assert _token(viewer) not in repr(viewer)
    assert len(_token(viewer)) >= 32
