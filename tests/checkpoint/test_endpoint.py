"""The HTTP endpoint that takes requests for checkpoints: on loopback, and only of those who know its token."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from archive import checkpointing
from archive.base.errors import UsageError
from archive.checkpoint import requests
from archive.checkpoint.endpoint import Endpoint


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    """An endpoint of this process."""
    made = requests.serve()
    yield made
    made.close()


@pytest.fixture
def endpoint(served: Endpoint) -> Endpoint:
    """The same, and nobody has asked yet."""
    requests._asked.flag.clear()
    return served


def ask(endpoint: Endpoint, path: str = "/checkpoint", method: str = "POST", **headers: str) -> tuple[int, Any]:
    """Status and answer to a request with these headers; `Host` may be another than the one that is called."""
    address = endpoint._server.server_address
    connection = http.client.HTTPConnection(str(address[0]), int(address[1]), timeout=10)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body.startswith(b"{") else body
    finally:
        connection.close()


def bearing(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}"}


def test_it_takes_requests_of_who_has_the_token(endpoint: Endpoint) -> None:
    assert ask(endpoint, Content_Length="0", **bearing(endpoint)) == (202, {"requested": True})
    assert requests.requested()
    assert ask(endpoint, "/checkpoints", **bearing(endpoint)) == (404, {"error": "POST /checkpoint"})
    assert not requests.requested()


def test_it_listens_on_loopback_and_each_has_a_token_of_its_own(endpoint: Endpoint) -> None:
    assert ipaddress.ip_address(str(endpoint._server.server_address[0])).is_loopback
    other = checkpointing.serve()
    other.close()
    assert other.token != endpoint.token
    assert min(len(other.token), len(endpoint.token)) >= 32
    assert endpoint.token not in endpoint.url + repr(endpoint)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer wrong", "{token}", "Basic {token}", "Bearer {token}x", "Bearer {short}"]
)
def test_a_wrong_token_asks_for_nothing(endpoint: Endpoint, given: str) -> None:
    sent = given.format(token=endpoint.token, short=endpoint.token[:-1])
    status, answer = ask(endpoint, Authorization=sent)
    assert status == 401
    assert endpoint.token not in json.dumps(answer)
    assert not requests.requested()


def test_without_a_token_nothing_is_asked_for(endpoint: Endpoint) -> None:
    assert ask(endpoint)[0] == 401
    assert ask(endpoint, f"/checkpoint?token={endpoint.token}")[0] == 401
    assert not requests.requested()


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example:{port}", "", "[", ":1"],
)
def test_a_page_whose_name_leads_here_is_refused(endpoint: Endpoint, host: str) -> None:
    named = host.format(port=endpoint._server.server_address[1])
    assert ask(endpoint, Host=named, **bearing(endpoint))[0] == 403
    assert not requests.requested()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:80", "LOCALHOST", "[::1]:9", "[::1]", "10.1.2.3:4", "{name}:7"]
)
def test_addresses_and_names_of_this_machine_are_right(endpoint: Endpoint, host: str) -> None:
    assert ask(endpoint, Host=host.format(name=socket.gethostname()), **bearing(endpoint))[0] == 202
    assert requests.requested()


@pytest.mark.parametrize("size", ["-1", "x", "99999999999999999999", "65537", "1e3"])
def test_a_body_that_would_never_end_is_not_waited_for(endpoint: Endpoint, size: str) -> None:
    assert ask(endpoint, Content_Length=size, **bearing(endpoint))[0] == 413
    assert not requests.requested()


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "HEAD", "DELETE"])
def test_other_verbs_do_nothing(endpoint: Endpoint, method: str) -> None:
    assert ask(endpoint, method=method, **bearing(endpoint))[0] == 501
    assert not requests.requested()


def test_a_client_that_leaves_says_nothing_on_stderr(endpoint: Endpoint, capfd: pytest.CaptureFixture[str]) -> None:
    host, port = endpoint._server.server_address[:2]
    with socket.create_connection((str(host), int(port))) as client:
        client.sendall(b"POST /checkpoint HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
    assert ask(endpoint, **bearing(endpoint))[0] == 202
    assert requests.requested()
    assert capfd.readouterr() == ("", "")


def test_a_token_and_names_may_be_given() -> None:
    with pytest.raises(UsageError, match="token"):
        requests.serve(token="short")
    with pytest.raises(UsageError, match="token"):
        requests.serve(token="with a line\nthat is another header")
    served = requests.serve(token="of-all-ranks-of-the-job", hosts=["Head.Cluster"])
    try:
        assert ask(served, Host="head.cluster:9", Authorization="Bearer of-all-ranks-of-the-job")[0] == 202
        assert requests.requested()
    finally:
        served.close()
