"""The admin server: what it says, what it lets pass, what it refuses and how."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import httpx
import pytest

from app.admin.server import page
from app.admin.status import Status

from .admin_rig import TOKEN, Rig, row

HOST = "http://127.0.0.1:8001"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def ask(rig: Rig, method: str, path: str, **more: Any) -> httpx.Response:
    """One request to the ASGI app."""

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=rig.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=more.pop("host", HOST)) as client:
            return await client.request(method, path, **more)

    return asyncio.run(main())


def act(rig: Rig, action: str, body: Any, **headers: str) -> httpx.Response:
    """An action with the token."""
    return ask(rig, "POST", f"/actions/{action}", json=body, headers=BEARER | headers)


def code(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error, which has message and field too."""
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["message"]
    return answer.status_code, error["code"]


def test_status_says_what_the_coordinator_says() -> None:
    """Each replica has the coordinator's figures, tiers by name, and the totals are their sums."""
    rig = Rig()
    status = Status.model_validate(ask(rig, "GET", "/status.json").json())
    assert [tier.name for tier in status.tiers] == ["critical", "standard", "relaxed", "background"]
    first, second, third = status.replicas
    assert (first.id, first.used_blocks, first.total_blocks, first.headroom_blocks) == ("k3x9q1ab", 430, 512, 143.4)
    assert [(t.running, t.waiting, t.blocks) for t in first.tiers] == [(2, 0, 70), (9, 3, 240), (0, 0, 0), (3, 2, 110)]
    assert (second.state, second.phi, third.phi) == ("draining", None, 11.2)
    assert [(m.source, m.destination, m.count) for m in status.moving] == [("m7w2e5cd", "z1p8r4ef", 2)]
    totals = status.totals
    assert (totals.replicas, totals.serving, totals.running, totals.waiting) == (3, 2, 22, 5)
    assert (totals.used_blocks, totals.total_blocks) == (430 + 46, 1024)
    assert status.settings.scheduling == {"policy": "larry", "alpha": 1.0}
    assert status.settings.balancing["beta"] == 6.5
    assert status.events[0].text == "m7w2e5cd drains, 11 requests are to leave"
    assert (status.targets["EngineReplica"], status.deployments["EngineReplica"]["STARTING"]) == (4, 1)


def test_the_schema_describes_the_answer() -> None:
    """The schema beside it names exactly the fields of the answer, at the top and of a replica."""
    rig = Rig()
    schema, answer = ask(rig, "GET", "/status.schema.json").json(), ask(rig, "GET", "/status.json").json()
    assert set(schema["properties"]) == set(answer)
    assert set(schema["$defs"]["Replica"]["properties"]) == set(answer["replicas"][0])


def test_it_lives_without_the_coordinator() -> None:
    """While the coordinator is dead, the last facts stay, with the reason; orders are answered 503 with Retry-After."""

    async def main() -> None:
        rig = Rig()
        transport = httpx.ASGITransport(app=rig.app())
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            assert (await client.get("/status.json")).json()["coordinator"]["answers"]
            rig.coordinator.away = RuntimeError("the actor died")
            await asyncio.sleep(0.35)  # older than what is shown unasked
            status = (await client.get("/status.json")).json()
            assert len(status["replicas"]) == 3
            assert status["coordinator"]["problem"] == "the actor died"
            assert status["coordinator"]["since"] < status["t"]
            answer = await client.post("/actions/drain", json={"replica": "z1p8r4ef"}, headers=BEARER)
            assert code(answer) == (503, "away")
            assert answer.headers["retry-after"] == "5"
            assert (await client.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_fleet_without_replicas() -> None:
    """No engine alive is a fleet like any other: empty lists and zeros."""
    status = ask(Rig(rows={}), "GET", "/status.json").json()
    assert status["replicas"] == status["moving"] == []
    assert status["totals"]["total_blocks"] == 0


def test_many_viewers_are_one_question() -> None:
    """Who asks at once shares one answer of the coordinator."""

    async def main() -> int:
        rig = Rig()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=rig.app()), base_url=HOST) as client:
            await asyncio.gather(*(client.get("/status.json") for _ in range(20)))
        return rig.coordinator.asked

    assert asyncio.run(main()) == 1


def test_drain_and_undrain() -> None:
    """The orders reach the coordinator; an unknown replica is refused with the names that there are."""
    rig = Rig()
    assert act(rig, "drain", {"replica": "z1p8r4ef"}).json() == {"done": "drain"}
    assert rig.coordinator.rows["z1p8r4ef"]["state"] == "draining"
    assert act(rig, "undrain", {"replica": "z1p8r4ef"}).status_code == 200
    assert rig.coordinator.rows["z1p8r4ef"]["state"] == "serving"
    answer = act(rig, "drain", {"replica": "nobody"})
    assert code(answer) == (409, "refused")
    assert "k3x9q1ab" in answer.json()["error"]["message"]


def test_settings_go_the_way_of_the_file() -> None:
    """A policy with its parameters replaces that section of user_config and leaves the other; an event says so."""
    rig = Rig()
    assert act(rig, "settings", {"balancing": {"policy": "p2c"}}).status_code == 200
    assert act(rig, "settings", {"scheduling": {"policy": "larry", "alpha": 2.5}}).status_code == 200
    assert rig.serve.user_config == {"scheduling": {"policy": "larry", "alpha": 2.5}, "balancing": {"policy": "p2c"}}
    assert rig.coordinator.events.recent()[0]["text"] == "settings changed: scheduling larry alpha=2.5"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"scheduling": {"policy": "larry", "alpha": -1}}, "scheduling.alpha"),
        ({"scheduling": {"policy": "lary"}}, "scheduling.policy"),
        ({"balancing": {"policy": "tiered_sal", "beta_": 1}}, "balancing.beta_"),
        ({"tiers": []}, "tiers"),
        ({}, None),
        ({"scheduling": None}, None),
    ],
)
def test_wrong_settings_change_nothing(body: dict[str, Any], field: str | None) -> None:
    """A policy or parameter that does not exist or is out of range is refused by name, as in the file."""
    rig = Rig()
    before = dict(rig.serve.user_config)
    answer = act(rig, "settings", body)
    assert code(answer) == (409, "refused")
    assert answer.json()["error"]["field"] == field
    assert rig.serve.user_config == before


def test_an_application_without_a_file() -> None:
    """Where there is no Serve file, the page says that settings cannot be changed, and so does the action."""
    rig = Rig()
    rig.serve.declared = False
    assert ask(rig, "GET", "/status.json").json()["settings"]["changeable"] is not None
    assert code(act(rig, "settings", {"balancing": {"policy": "p2c"}})) == (409, "refused")


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN[:-1]}, {"Authorization": "Bearer "}]
)
def test_no_action_without_the_token(headers: dict[str, str]) -> None:
    """Without the right token an action is refused and nothing happens."""
    rig = Rig()
    answer = ask(rig, "POST", "/actions/drain", json={"replica": "z1p8r4ef"}, headers=headers)
    assert code(answer) == (401, "unauthorized")
    assert rig.coordinator.rows["z1p8r4ef"]["state"] == "serving"


def test_no_action_where_no_token_is_set() -> None:
    """A server without a token only shows; an empty one does not open it."""
    rig = Rig(token=None)
    answer = ask(rig, "POST", "/actions/drain", json={"replica": "z1p8r4ef"}, headers={"Authorization": "Bearer "})
    assert code(answer) == (403, "read_only")
    assert ask(rig, "GET", "/status.json").json()["actions"] is False


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
     {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://127.0.0.1:9999"}],
)  # fmt: skip
def test_no_action_for_another_site(headers: dict[str, str]) -> None:
    """Even with the token, what a browser sends for another site changes nothing."""
    rig = Rig()
    assert code(act(rig, "drain", {"replica": "z1p8r4ef"}, **headers)) == (403, "cross_origin")
    assert rig.coordinator.rows["z1p8r4ef"]["state"] == "serving"


def test_our_own_page_may_act() -> None:
    """The headers that a browser adds for the page itself are accepted."""
    headers = {"Origin": HOST, "Sec-Fetch-Site": "same-origin"}
    assert act(Rig(), "drain", {"replica": "z1p8r4ef"}, **headers).status_code == 200


def test_nothing_changes_by_get() -> None:
    """An action asked for by GET is 405, in the shape of every error."""
    rig = Rig()
    answer = ask(rig, "GET", "/actions/drain?replica=z1p8r4ef", headers=BEARER)
    assert code(answer) == (405, "method_not_allowed")
    assert rig.coordinator.rows["z1p8r4ef"]["state"] == "serving"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"json": {"replica": ""}}, (400, "invalid")),
        ({"json": {"replica": 7}}, (400, "invalid")),
        ({"json": ["z1p8r4ef"]}, (400, "invalid")),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, (400, "not_json")),
        ({"data": {"replica": "z1p8r4ef"}}, (415, "not_json")),
        ({"json": {"replica": "x" * 20_000}}, (413, "too_large")),
    ],
)
def test_wrong_bodies(sent: dict[str, Any], expected: tuple[int, str]) -> None:
    """What is no order is a 4xx with a reason; a form, which any site can send, is none."""
    sent = {**sent, "headers": BEARER | sent.get("headers", {})}
    assert code(ask(Rig(), "POST", "/actions/drain", **sent)) == expected


def test_unknown_paths() -> None:
    """What is not there is 404 in the shape of every error, and actions are named."""
    assert code(ask(Rig(), "GET", "/metrics")) == (404, "not_found")
    assert code(act(Rig(), "reboot", {})) == (404, "unknown_action")


@pytest.mark.parametrize("host", ["http://evil.example", "http://127.0.0.1.evil.example:8001", "http://10.0.0.5:8001"])
def test_foreign_names_of_the_loopback_port(host: str) -> None:
    """A loopback port answers to no name that somebody pointed at it (DNS rebinding)."""
    assert code(ask(Rig(), "GET", "/status.json", host=host)) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["http://localhost:1234", "http://[::1]:8001", "http://127.0.0.1"])
def test_own_names_of_the_loopback_port(host: str) -> None:
    """localhost on any port works, as through an SSH tunnel."""
    assert ask(Rig(), "GET", "/status.json", host=host).status_code == 200


def test_reading_from_other_machines_needs_the_token() -> None:
    """Where other machines reach the port, the facts need the token; the page itself holds none."""
    rig = Rig(public=True)
    assert code(ask(rig, "GET", "/status.json", host="http://fleet.example")) == (401, "unauthorized")
    assert ask(rig, "GET", "/status.json", host="http://fleet.example", headers=BEARER).status_code == 200
    assert "k3x9q1ab" not in ask(rig, "GET", "/status", host="http://fleet.example").text


def test_the_page_is_self_contained() -> None:
    """One document, no address of anywhere else, and a policy that lets nothing but its own style and script run."""
    answer = ask(Rig(), "GET", "/status")
    text, policy = page()
    assert answer.text == text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "/* page." not in text
    given = answer.headers["content-security-policy"]
    assert given == policy
    assert given.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in given
    for header in ("x-frame-options", "x-content-type-options", "referrer-policy", "cache-control"):
        assert header in answer.headers
        assert header in ask(Rig(), "GET", "/status.json").headers


def test_infinite_figures_are_null() -> None:
    """JSON has no infinity: a replica with nothing to run in full is null, not an invalid document."""
    rig = Rig(rows={"a": row(phi=float("inf"))})
    assert ask(rig, "GET", "/status.json").json()["replicas"][0]["phi"] is None


def test_it_loads_no_engine() -> None:
    """The admin process imports neither vLLM nor torch."""
    program = "import sys, app.admin.deployment; print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
