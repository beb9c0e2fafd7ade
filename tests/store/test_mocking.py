"""Where moto's mock_aws is met, the error says what to use instead."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from archive.store.retry import Tries, explain
from tests.support.places import ROOT

CODE = """
import botocore.session
from moto import mock_aws

import archive

with mock_aws():
    botocore.session.Session().create_client("s3", region_name="us-east-1").create_bucket(Bucket="mocked")
    for call in (archive.create, archive.open):
        try:
            call("s3://mocked/x")
        except archive.base.errors.StorageError as error:
            print(error)
"""


def test_mock_aws_is_named_with_its_remedy() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE]  # in this process it would leave coroutines behind
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=True
    )
    told = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in told] == ["get", "get"]  # creating looks first
    for line in told:
        assert re.search(r"s3://mocked/x.*mock_aws.*ThreadedMotoServer.*endpoint_url.*docs/how-to/testing.md", line)


@pytest.mark.parametrize(
    ("cause", "loaded", "told"),
    [
        (AttributeError("'coroutine' object has no attribute 'items'"), True, True),
        (TypeError("object bytes can't be used in 'await' expression"), True, True),
        (AttributeError("'coroutine' object has no attribute 'items'"), False, False),
        (AttributeError("'NoneType' object has no attribute 'items'"), True, False),
        (ValueError("coroutine"), True, False),
    ],
)
def test_nothing_else_is_taken_for_it(
    cause: Exception, loaded: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moto", sys) if loaded else monkeypatch.delitem(sys.modules, "moto", raising=False)
    error = explain(cause, Tries(1.0), "get", "s3://b/x", lambda text: text)
    assert ("mock_aws" in str(error)) is told
