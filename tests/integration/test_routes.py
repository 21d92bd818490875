"""Only the public API is reachable over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .answers import ask
from .servers import Server
from .shapes import CHAT, QUESTION, RESPONSES, STREAM, chat
from .test_bad_inputs import error_of

pytestmark = pytest.mark.integration

HIDDEN = [
    "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/metrics", "/load", "/server_info", "/ping",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/inference/v1/generate", "/invocations", "/kv_event_sources", "/generative_scoring", "/v1/systemone",
    "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/abort_requests",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/release_kv_cache_memory",
    "/start_profile", "/stop_profile", "/update_weights", "/init_weight_transfer_engine", "/get_world_size",
    "/weight_info", "/weight_checker", "/fault_tolerance/apply", "/fault_tolerance/status", "/tokenizer_info",
    "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/render", "/v1/completions/derender", "/v1/messages/render",
    "/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling", "/classify", "/v1/audio/transcriptions",
    "/v1/chat/completions/../../../docs", "/%2e%2e/docs", "/v1/responses/%2e%2e/%2e%2e/docs", "/V1/models",
]  # fmt: skip
# Serve's own proxy answers these two itself, before any application.
PROXY = ["/-/routes", "/-/healthz"]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", HIDDEN)
def test_internals_are_hidden(fleet: Server, path: str, method: str) -> None:
    """What reveals or changes the engine is 404 in OpenAI's error shape, for reading and for writing."""
    answer = ask(fleet.url, path, {} if method == "POST" else None, method)
    assert answer.status == 404, answer.body
    assert error_of(answer)["message"]


@pytest.mark.parametrize("path", PROXY)
def test_serve_proxy_reveals_no_internals(fleet: Server, path: str) -> None:
    """The proxy's own routes say no more than that it lives and which application is at the root."""
    answer = ask(fleet.url, path, method="GET")
    assert answer.status in (200, 404)
    assert answer.body in ("success", {"/": "tidegate"}) or answer.status == 404


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health(fleet: Server, path: str) -> None:
    """A fleet with a living replica is live and ready."""
    assert ask(fleet.url, path, method="GET").status == 200


def test_version_says_versions_only(fleet: Server) -> None:
    """The version route gives version strings and nothing about the machine."""
    body = ask(fleet.url, "/version", method="GET").body
    assert body
    assert all(isinstance(value, str) and "/" not in value for value in body.values())


def test_models_hide_the_path(fleet: Server) -> None:
    """The model list does not tell where the weights lie on disk."""
    card = ask(fleet.url, "/v1/models", method="GET").body["data"][0]
    assert not str(card.get("root") or "").startswith("/")


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["full", "stream"])
def test_request_id_goes_in_and_out(fleet: Server, stream: dict) -> None:
    """A client's request id comes back as a header and inside the completion id; without one a new one is made."""
    given = ask(fleet.url, CHAT, chat(max_tokens=2, **stream), headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    body = given.body or given.events[0][1]
    assert body["id"] == "chatcmpl-abc-123"
    made = {ask(fleet.url, CHAT, chat(max_tokens=1, **stream)).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


def test_request_id_on_errors(fleet: Server) -> None:
    """Errors carry the request id too, so that a log line can be found for them."""
    for path, body in ((CHAT, chat(temperature=-1)), ("/v1/nothing", {})):
        assert ask(fleet.url, path, body, headers={"X-Request-Id": "err-1"}).headers["x-request-id"] == "err-1"


def test_responses_render_is_hidden(fleet: Server) -> None:
    """What looks like the id of a response is one, at most: nothing else answers at that path."""
    assert ask(fleet.url, RESPONSES + "/render", method="GET").status == 404
    assert ask(fleet.url, RESPONSES + "/render", {}).status in (404, 405)


@pytest.mark.parametrize("value", ["x" * 500, "two words", ""], ids=["long", "space", "empty"])
def test_odd_request_ids_are_replaced(fleet: Server, value: str) -> None:
    """An id that would spoil a log line does not become the completion's id, and is no error."""
    answer = ask(fleet.url, CHAT, chat(max_tokens=1), headers={"X-Request-Id": value})
    assert answer.status == 200
    assert answer.body["id"].removeprefix("chatcmpl-") not in ("", value)


def test_websocket_is_refused(fleet: Server) -> None:
    """A websocket upgrade is not accepted."""
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    try:
        reply = httpx.get(fleet.url + CHAT, headers=headers, timeout=20)
    except httpx.TransportError:
        return
    assert reply.status_code >= 400


def test_concurrent_same_request_ids(fleet: Server) -> None:
    """Two requests with one client-given id run side by side and both finish."""
    body = chat(messages=QUESTION, max_tokens=8)
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: ask(fleet.url, CHAT, body, headers={"X-Request-Id": "twin"}), range(2)))
    assert [answer.status for answer in answers] == [200, 200]
    texts = {answer.body["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) == 1
