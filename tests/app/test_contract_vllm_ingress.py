"""The vLLM 0.32 interfaces that the ingress rests on: one test each, to fail at an upgrade."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from app.fleet_client import FleetEngineClient
from app.gate import ROUTES
from app.vllm_compat import (
    TASKS,
    EngineClient,
    EngineCoreRequest,
    InputProcessor,
    OutputProcessor,
    ParentRequest,
    RequestOutputCollector,
    SamplingParams,
    openai_error,
)

from .scripted_fleet import FleetMaker, silent

NOTHING = (None, 0.0, None, None, None)  # the rest of a request's required fields
HEALTH = {"/health/live", "/health/ready"}  # ours
#: What vLLM's app answers besides ROUTES. The gate hides all of it.
HIDDEN = {
    *("/docs", "/docs/oauth2-redirect", "/generative_scoring", "/inference/v1/abort_requests"),
    *(
        "/inference/v1/generate",
        "/invocations",
        "/is_scaling_elastic_ep",
        "/kv_event_sources",
        "/load",
        "/metrics",
        "/openapi.json",
    ),
    *("/ping", "/redoc", "/scale_elastic_ep", "/v1/chat/completions/batch", "/v1/chat/completions/derender"),
    *("/v1/chat/completions/render", "/v1/completions/derender", "/v1/completions/render", "/v1/messages/render"),
    *("/v1/responses/render", "/v1/systemone"),
}


@pytest.fixture
def routes(run: Any, make_fleet: FleetMaker) -> dict[str, set[str]]:
    """Paths of vLLM's app and their methods."""

    async def scenario() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for route in (await (await make_fleet(silent)).app()).routes:
            path = getattr(route, "path", None)
            assert path is not None, f"{route!r} has no path: the gate's table cannot be compared with the app any more"
            found.setdefault(path, set()).update(getattr(route, "methods", None) or ())
        return found

    found: dict[str, set[str]] = run(scenario())
    return found


def test_every_method_of_an_engine_client_is_there() -> None:
    """EngineClient has no abstract method that the fleet's client lacks."""
    missing = sorted(FleetEngineClient.__abstractmethods__)
    assert not missing, f"vLLM's EngineClient asks for {missing}: add them to FleetEngineClient"


def test_signatures_are_vllms() -> None:
    """Methods that the serving classes call take what EngineClient's take, so a new argument is noticed."""
    for name in ("generate", "check_admission", "abort"):
        theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (EngineClient, FleetEngineClient))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ], f"EngineClient.{name} changed: decide what the fleet does with it"


def test_client_can_be_built(run: Any, make_fleet: FleetMaker) -> None:
    """The client has what the serving classes read off an engine client, and never says that it failed."""

    async def scenario() -> None:
        client = (await make_fleet(silent)).client
        for name in ("vllm_config", "model_config", "renderer", "input_processor"):
            assert getattr(client, name) is not None
        assert (client.errored, client.is_running, client.is_stopped) == (False, True, False)
        assert await client.get_supported_tasks() == TASKS
        status, _ = openai_error(client.dead_error)
        assert status == 503

    run(scenario())


def test_public_routes_exist(routes: dict[str, set[str]]) -> None:
    """Each path of the gate's table, but our own health paths, is answered by vLLM's app with that method."""
    theirs = {path.replace("{response_id}", "{id}"): methods for path, methods in routes.items()}
    for path, methods in ROUTES.items():
        if path not in HEALTH:
            assert set(methods) <= theirs.get(path, set()), f"vLLM's app has no {methods} {path}"


def test_no_route_is_new(routes: dict[str, set[str]]) -> None:
    """vLLM's app answers the paths that were looked at, no others: publish or hide each new one."""
    paths = {path.replace("{response_id}", "{id}") for path in routes}
    assert paths - set(ROUTES) == HIDDEN, "new or removed routes: decide on each, then change HIDDEN or ROUTES"


def test_processors_take_what_we_give() -> None:
    """The three objects between tokens and answers have the methods and parameters that the client uses."""

    def names(function: Any) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]

    wanted = {"request_id", "prompt", "params", "supported_tasks", "lora_request", "tokenization_kwargs"}
    assert wanted | {"trace_headers", "priority", "session_id"} <= set(names(InputProcessor.process_inputs))
    assert names(InputProcessor.assign_request_id) == ["request"]
    assert names(OutputProcessor.add_request)[:5] == ["request", "prompt", "parent_req", "request_index", "queue"]
    assert names(OutputProcessor.abort_requests) == ["request_ids", "internal"]
    assert names(OutputProcessor.process_outputs)[0] == "engine_core_outputs"
    assert names(RequestOutputCollector.__init__) == ["output_kind", "request_id"]
    assert {"put", "get", "get_nowait"} <= set(vars(RequestOutputCollector))


def test_children_of_a_request() -> None:
    """ParentRequest gives each of n sequences an id and parameters of its own: seeds counted on from the request's."""
    params = SamplingParams(n=3, temperature=1.0, seed=7)
    parent = ParentRequest(EngineCoreRequest("r", [1], None, params, *NOTHING, external_req_id="x"))
    children = [parent.get_child_info(index) for index in range(3)]
    assert len({rid for rid, _ in children}) == 3
    assert [(params.n, params.seed) for _, params in children] == [(1, 7), (1, 8), (1, 9)]
