"""Which question of the browser is answered by which function, and what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archive.base import AccessDeniedError, ArchiveError, NotFoundError, UsageError, one_line
from archive.view import answers, pages
from archive.view.answers import Answer
from archive.view.shown import Shown
from archive.view.wire import Query, Reply, json_reply, text_reply

APP = Path(__file__).with_name("app")
MAX_BODY = 4 * 1024 * 1024
MAX_REASON = 2000  # characters
logger = logging.getLogger("archive")

QUESTIONS = answers.QUESTIONS | {"page": pages.page}
CHANGES = answers.CHANGES

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (NotFoundError, 404),
    (UsageError, 400),
    (AccessDeniedError, 403),
    (ArchiveError, 502),
)


def application(shown: Shown) -> Any:
    """The viewer of an archive, as an ASGI application; the page asks with what scope["token"] says."""
    from starlette.applications import Starlette
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    first = (APP / "index.html").read_text(encoding="utf-8")
    routes = [
        Route("/", lambda request: _sent(_page(first, request.scope["token"]))),
        *(Route(f"/api/{path}", _endpoint(shown, answer), methods=["GET"]) for path, answer in QUESTIONS.items()),
        *(Route(f"/api/{path}", _endpoint(shown, answer), methods=["POST"]) for path, answer in CHANGES.items()),
        Mount("/app", StaticFiles(directory=APP)),
    ]
    return Starlette(routes=routes)


def _page(text: str, token: str) -> Reply:
    return text_reply(text.replace("{{token}}", token), "text/html; charset=utf-8")


def _endpoint(shown: Shown, answer: Answer) -> Callable[[Any], Any]:
    from starlette.concurrency import run_in_threadpool

    async def endpoint(request: Any) -> Any:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _sent(json_reply({"error": f"more than {MAX_BODY} bytes at once"}, 413))
        query = Query({**request.query_params, **request.path_params}, body)
        return _sent(await run_in_threadpool(_answered, answer, shown, query))

    return endpoint


def _answered(answer: Answer, shown: Shown, query: Query) -> Reply:
    """The reply, or what went wrong, which says what, where and what to do."""
    try:
        return answer(shown, query)
    except Exception as e:
        status = next((status for kind, status in _STATUS if isinstance(e, kind)), 500)
        if status == 500:
            logger.exception("the viewer could not answer")
        reason = one_line(str(e)[:MAX_REASON]) or type(e).__name__
        return json_reply({"error": reason, "kind": type(e).__name__}, status)


def _sent(reply: Reply) -> Any:
    from starlette.responses import Response

    headers = {f"X-{name}": value for name, value in reply.facts.items()}
    return Response(reply.body, reply.status, headers, media_type=reply.kind)
