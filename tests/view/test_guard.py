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
    return f"archive-view-{viewer.origin.rpartition(':')[2]}="


def _bearer(viewer: Viewer) -> dict[str, str]:
    return {"Authorization": f"Bearer {_token(viewer)}"}


def test_with_the_token_everything_answers(viewer: Viewer) -> None:
    page = _asked(viewer, f"/?token={_token(viewer)}")
    assert page.status == 200
    assert "HttpOnly" in page.headers["set-cookie"]
    assert "SameSite=Strict" in page.headers["set-cookie"]
    cookie = page.headers["set-cookie"].partition(";")[0]
    assert _asked(viewer, "/api/about", **_bearer(viewer)).status == 200
    assert _asked(viewer, "/", Cookie=cookie).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/api/about", "/api/episodes", "/api/nothing", "/?token=", "/?token=wrong", "/api/about?token=x"]
)
def test_without_the_token_nothing_does(viewer: Viewer, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {_token(viewer)}"},
        {"Cookie": f"{_cookie(viewer)}wrong"},
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


def test_another_sites_page_is_refused_even_with_the_cookie(viewer: Viewer) -> None:
    cookie = _cookie(viewer) + _token(viewer)
    assert _asked(viewer, "/api/about", Cookie=cookie, Sec_Fetch_Site="cross-site").status == 403
    assert _asked(viewer, "/api/about", Cookie=cookie, Sec_Fetch_Site="same-origin").status == 200


def test_a_cookie_changes_nothing(viewer: Viewer) -> None:
    cookie = _cookie(viewer) + _token(viewer)
    assert _asked(viewer, "/api/labels", method="POST", body=LABEL, Cookie=cookie).status == 403


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
