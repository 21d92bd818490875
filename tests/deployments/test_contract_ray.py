"""Every name of Ray Serve 2.60 that is private, or whose meaning we rest on: one test each, to fail at an upgrade."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from ray import serve
from ray._private import worker
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.serve import config as serve_config
from ray.serve import context as serve_context
from ray.serve import schema as serve_schema
from ray.serve._private import client as serve_client
from ray.serve._private import replica as serve_replica
from ray.serve._private import router as serve_router
from ray.serve._private.common import ReplicaID, RequestMetadata, RunningReplicaInfo
from ray.serve._private.constants import RECORD_REPLICA_METADATA_METHOD
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.config import RequestRouterConfig
from ray.serve.context import ReplicaContext
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ReplicaRank
from uvicorn.protocols.http import h11_impl, httptools_impl

from app.ingress import Ingress
from deployments import serve_replica as our_serve_replica
from deployments.replica import EngineReplica
from deployments.router import FleetRouter


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters, without self; an asterisk before those that are keywords only."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names[1:] if names[0] == "self" else names


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("_choose_replica_for_request", ["pending_request", "*", "is_retry"]),
        ("update_replicas", ["replicas"]),
        ("on_replica_actor_died", ["replica_id"]),
        ("on_request_completed", ["replica_id", "internal_request_id"]),
        ("choose_replicas", ["candidate_replicas", "pending_request"]),
    ],
)
def test_router_hooks(method: str, expected: list[str]) -> None:
    """The methods that FleetRouter overrides exist in the base class with the parameters that Serve passes."""
    base = getattr(RequestRouter, method, None)
    assert base is not None, f"RequestRouter.{method} is gone: see how Router now asks for a replica, change router.py"
    ours = getattr(FleetRouter, method)
    assert parameters(base) == expected == parameters(ours), f"RequestRouter.{method} changed: adapt FleetRouter"
    assert inspect.iscoroutinefunction(base) == inspect.iscoroutinefunction(ours)


def test_serve_asks_the_overridden_method() -> None:
    """Serve's Router calls `_choose_replica_for_request(request, is_retry=...)` directly and tells each call's end."""
    source = inspect.getsource(serve_router)
    remedy = "Router no longer goes through {}: FleetRouter's override would be bypassed, see _route_and_send_request"
    assert "._choose_replica_for_request(" in source, remedy.format("_choose_replica_for_request")
    assert "pr, is_retry=is_retry" in source, remedy.format("is_retry")
    assert ".on_request_completed(" in source, remedy.format("on_request_completed")
    assert ".on_replica_actor_died(" in source, remedy.format("on_replica_actor_died")


def test_router_state() -> None:
    """The base class offers its loop and deployment id under these names, and hands our kwargs to initialize_state."""
    assert isinstance(inspect.getattr_static(RequestRouter, "_event_loop", None), property), "RequestRouter._event_loop"
    assert "self._deployment_id = deployment_id" in inspect.getsource(RequestRouter.__init__)
    assert parameters(RequestRouter.initialize_state) == ["kwargs"]
    config = RequestRouterConfig(
        request_router_class="deployments.router:FleetRouter",
        request_router_kwargs={"balancing": {"policy": "sal"}},
        request_routing_stats_period_s=3600,
    )
    assert config.get_request_router_class().__name__ == "FleetRouter"


def test_pending_request() -> None:
    """A request that waits for a replica shows its keywords, internal id and back-off flag under these names."""
    fields = {field.name for field in dataclasses.fields(PendingRequest)}
    assert {"args", "kwargs", "metadata", "routing_context"} <= fields
    assert "internal_request_id" in {field.name for field in dataclasses.fields(RequestMetadata)}
    assert "should_backoff" in {field.name for field in dataclasses.fields(RequestRoutingContext)}


def test_replica_metadata() -> None:
    """What `record_replica_metadata` returns reaches every router as `RunningReplica.replica_metadata`."""
    assert hasattr(EngineReplica, RECORD_REPLICA_METADATA_METHOD), f"Serve now calls {RECORD_REPLICA_METADATA_METHOD}"
    assert isinstance(RunningReplica.replica_metadata, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert "replica_metadata" in {field.name for field in dataclasses.fields(RunningReplicaInfo)}
    assert "unique_id" in {field.name for field in dataclasses.fields(ReplicaID)}


def test_replica_context() -> None:
    """A replica learns its id and its rank on the node from the context."""
    assert {"replica_id", "rank"} <= {field.name for field in dataclasses.fields(ReplicaContext)}
    assert "local_rank" in ReplicaRank.model_fields


def test_handle_can_build_its_router_early() -> None:
    """`DeploymentHandle._init()` without arguments builds the router, so that reports flow before the first call."""
    init = getattr(DeploymentHandle, "_init", None)
    assert init is not None, "DeploymentHandle._init is gone: Ingress needs another way to build its router at start"
    assert parameters(init) == ["kwargs"]
    assert "_create_router" in inspect.getsource(init)
    assert isinstance(inspect.getattr_static(DeploymentHandle, "deployment_name"), property)


def test_response_can_be_cancelled() -> None:
    """A response is awaited for its result and has `cancel()`."""
    assert hasattr(DeploymentResponse, "__await__")
    assert callable(DeploymentResponse.cancel)


def test_app_is_bound_late() -> None:
    """`@serve.ingress()` without an app takes the ASGI app from a method of this name, after the constructor."""
    name = serve_replica.SERVE_BUILD_ASGI_APP_METHOD
    assert name == "__serve_build_asgi_app__", f"Ingress must now offer its app as {name}"
    assert callable(getattr(Ingress, name))
    with pytest.raises(ValueError, match=name):
        serve.ingress()(type("WithoutApp", (), {}))


def test_stopping_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_stopping` reads the flag that Serve's replica sets first of all when it is told to stop."""
    assert "self._replica_impl: Replica = " in inspect.getsource(serve_replica.ReplicaActor), "see serve_replica.py"
    source = inspect.getsource(serve_replica)
    assert "self._shutting_down = False" in source, "the flag is gone or renamed: see serve_replica.is_stopping"
    assert "self._shutting_down = True" in source, "the flag is gone or renamed: see serve_replica.is_stopping"
    assert isinstance(worker.global_worker.actors, dict)

    class Core:
        def get_actor_id(self) -> str:
            return "me"

    class Actor:
        _replica_impl = type("Impl", (), {"_shutting_down": False})()

    monkeypatch.setattr(worker.global_worker, "core_worker", Core(), raising=False)
    monkeypatch.setattr(worker.global_worker, "actors", {"me": Actor()})
    assert our_serve_replica.is_stopping() is False
    Actor._replica_impl._shutting_down = True
    assert our_serve_replica.is_stopping() is True


def test_stopping_replica_takes_calls_until_it_is_empty() -> None:
    """A replica that is told to stop refuses calls only after its last one has ended: moves off it can be followed."""
    stops = inspect.getsource(serve_replica.Replica._perform_graceful_shutdown)
    order = [stops.index(step) for step in ("_shutting_down = True", "_drain_ongoing_requests(", "_quiescing = True")]
    assert order == sorted(order), "pinned calls to a stopping replica: see FleetRouter._check_unlisted"
    assert "_shutting_down" not in inspect.getsource(serve_replica.Replica._can_accept_request)


def test_http_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """`http_host` reads the host of the HTTP options that Serve's client has fetched from the controller."""
    source = inspect.getsource(serve_client.ServeControllerClient)
    assert "self._controller.get_http_config.remote()" in source, "see serve_replica.http_host"
    assert isinstance(serve_client.ServeControllerClient.http_config, property), "see serve_replica.http_host"
    assert parameters(serve_context._get_global_client) == ["raise_if_no_controller_running"]
    assert "host" in serve_config.HTTPOptions.model_fields
    client = type("Client", (), {"http_config": serve_config.HTTPOptions(host="0.0.0.0")})()
    monkeypatch.setattr(our_serve_replica, "_get_global_client", lambda: client)
    assert our_serve_replica.http_host() == "0.0.0.0"


def test_server_reports_a_client_that_leaves() -> None:
    """The HTTP server speaks ASGI 2.3: from 2.4 on a stream listens for a disconnect only by sending.

    A stream that waits for its first token would then not notice that its client has left.
    """
    for module in (h11_impl, httptools_impl):
        assert '"spec_version": "2.3"' in inspect.getsource(module), "let the gate set 2.3 in the scope, see Gate"


def test_loss_of_a_replica_is_a_ray_error() -> None:
    """What a call raises when its replica is lost is caught by the two classes that streams.py catches."""
    assert issubclass(ActorDiedError, RayActorError)
    assert issubclass(RayActorError, RayError)
    assert issubclass(serve.exceptions.BackPressureError, RayServeException)
    assert not issubclass(RayError, RayServeException)


def test_serve_client_reads_and_deploys() -> None:
    """serve_config.py reads `deployed_app_config` and states from the details, and deploys a whole file."""
    client = serve_client.ServeControllerClient
    assert parameters(client.get_serve_details) == []
    assert parameters(client.deploy_apps)[0] == "config"
    details, deployment = serve_schema.ApplicationDetails.model_fields, serve_schema.DeploymentDetails.model_fields
    assert {"status", "message", "deployed_app_config", "deployments"} <= set(details)
    assert {"replicas", "target_num_replicas"} <= set(deployment)
    assert "state" in serve_schema.ReplicaDetails.model_fields
    assert "target_capacity" in serve_schema.ServeInstanceDetails.model_fields
