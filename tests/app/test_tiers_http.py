"""Tiers, keys and limits over HTTP and Python handles: the whole ingress over scripted replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from app.config.model import DEFAULT_MODEL_ID
from app.gate import GENERATES, ROUTES
from app.keys import new_key
from app.python_api import RequestRefused

from .asgi_client import Answer, ask
from .scripted_fleet import END, Fleet, FleetMaker, says, silent

CHAT, COMPLETIONS, RESPONSES, MESSAGES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": DEFAULT_MODEL_ID, "messages": HI},
    COMPLETIONS: {"model": DEFAULT_MODEL_ID, "prompt": "Hi"},
    RESPONSES: {"model": DEFAULT_MODEL_ID, "input": "Hi"},
    MESSAGES: {"model": DEFAULT_MODEL_ID, "messages": HI, "max_tokens": 5},
}
NAMES = ["critical", "standard", "relaxed", "background"]


async def until(condition: Any) -> None:
    """Wait until it holds."""
    while not condition():
        await asyncio.sleep(0.005)


class Crowd:
    """Clients that wait for an answer until they are told to leave."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.leave = asyncio.Event()
        self.tasks: list[asyncio.Task[Answer]] = []

    async def join(self, tier: str, **more: Any) -> asyncio.Task[Answer]:
        """One more client; returns once its sequences wait, or it is refused."""
        before = len(self.fleet.replicas.calls)
        body = {**BODIES[CHAT], "priority": tier, **more}
        task = asyncio.create_task(self.fleet.post(CHAT, body, leave=self.leave))
        self.tasks.append(task)
        await until(lambda: task.done() or len(self.fleet.replicas.calls) >= before + more.get("n", 1))
        return task

    async def go(self) -> None:
        """All leave."""
        self.leave.set()
        await asyncio.gather(*self.tasks)


@pytest.mark.parametrize("path", sorted(GENERATES))
def test_every_generating_route_takes_a_tier(run: Any, make_fleet: FleetMaker, path: str) -> None:
    """The tier reaches the replica and the router's keyword, the answer names it, garbage is the default tier."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        cases: list[tuple[dict[str, Any], dict[str, str], int]] = [
            ({}, {}, 1),
            ({}, {"x-vllm-priority": "critical"}, 0),
            ({}, {"x-vllm-priority": "nonsense"}, 1),
            ({"priority": 3}, {"x-vllm-priority": "0"}, 3),
            ({"priority": "relaxed"}, {}, 2),
            ({"priority": {"a": []}}, {}, 1),
            ({"priority": 2**70}, {}, 3),
            ({"service_tier": "priority"}, {}, 0),
            ({"service_tier": "batch"}, {}, 3),
            ({"service_tier": ["x"], "priority": None}, {}, 1),
        ]
        for stream in (False, True):
            for more, headers, tier in cases:
                body = {**BODIES[path], **more, "stream": stream}
                answer = await fleet.post(path, body, headers={**headers, "x-session-id": "one"})
                assert answer.status == 200, (more, answer.body)
                assert answer.headers["x-tidegate-tier"] == NAMES[tier]
                submit = fleet.replicas.calls[-1].submit
                assert submit.priority == tier, more
                assert b"ok" in answer.body
        assert len(set(fleet.replicas.sessions)) == 1
        assert isinstance(fleet.replicas.sessions[0], int)

    run(scenario())


def test_responses_echo_a_valid_service_tier(run: Any, make_fleet: FleetMaker) -> None:
    """The Responses API says which `service_tier` it was asked for, and `auto` where that was none of OpenAI's."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        for given, echoed in (("flex", "flex"), ("batch", "auto"), (7, "auto")):
            answer = await fleet.post(RESPONSES, {**BODIES[RESPONSES], "service_tier": given})
            assert answer.json()["service_tier"] == echoed

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_lower_tiers_are_shed_first(run: Any, make_fleet: FleetMaker, stream: bool) -> None:
    """In a full queue the newest request of the lowest tier makes way for a higher one: 429, why and when to return."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=4)
        crowd = Crowd(fleet)
        names = ("background", "relaxed", "background", "standard")
        old, relaxed, new, standard = [await crowd.join(name, stream=stream) for name in names]
        same = await fleet.post(CHAT, {**BODIES[CHAT], "priority": "background"})
        assert (same.status, same.headers["x-tidegate-reason"]) == (429, "queue_full")
        victims = [new, old, relaxed]
        for victim in victims:
            await crowd.join("critical", stream=stream)
            answer = await victim
            assert answer.status == 429
            assert answer.headers["x-tidegate-reason"] == answer.json()["error"]["code"] == "shed"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert "x-tidegate-tier" in answer.headers
        assert not standard.done()
        await until(lambda: fleet.replicas.running == 4)  # the victims' sequences are aborted on their replicas
        assert [call.submit.priority for call in fleet.replicas.calls if call.state == "running"] == [1, 0, 0, 0]
        await crowd.go()

    run(scenario())


def test_a_request_that_has_begun_is_not_shed(run: Any, make_fleet: FleetMaker) -> None:
    """One token delivered, a background answer goes on; of a request with several sequences all go or none."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=3)
        crowd = Crowd(fleet)
        pair = await crowd.join("background", n=2, temperature=1.0)
        begun = await crowd.join("background", n=2, temperature=1.0)  # refused: 4 > 3
        assert (await begun).status == 429
        fleet.replicas.calls[0].send(500)
        await until(lambda: len(fleet.reception.queue) == 1)
        await crowd.join("background")
        await crowd.join("background")
        await crowd.join("critical")
        await crowd.join("critical")
        refused = await fleet.post(CHAT, {**BODIES[CHAT], "priority": "critical", "n": 2, "temperature": 1.0})
        assert refused.status == 429  # only the pair could make way, and it has begun
        assert not pair.done()
        await crowd.go()

    run(scenario())


def test_a_tier_has_its_own_bound(run: Any, make_fleet: FleetMaker) -> None:
    """Beyond `max_queued` of a tier its requests are 429 `tier_queue_full`; the other tiers are not touched."""

    async def scenario() -> None:
        levels = [{"name": "high"}, {"name": "low", "max_queued": 1}]
        fleet = await make_fleet(silent, tiers={"levels": levels, "default": "high"})
        crowd = Crowd(fleet)
        await crowd.join("low")
        answer = await fleet.post(CHAT, {**BODIES[CHAT], "priority": "low"})
        assert (answer.status, answer.headers["x-tidegate-reason"]) == (429, "tier_queue_full")
        assert "retry-after" in answer.headers
        assert not (await crowd.join("high")).done()
        await crowd.go()

    run(scenario())


def test_no_replica_has_a_reason(run: Any, make_fleet: FleetMaker) -> None:
    """503 says `no_replica` in header and body."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.has_replica = False
        for stream in (False, True):
            answer = await fleet.post(CHAT, {**BODIES[CHAT], "stream": stream})
            assert answer.status == 503
            assert answer.headers["x-tidegate-reason"] == answer.json()["error"]["code"] == "no_replica"

    run(scenario())


def test_keys_guard_everything_but_health(run: Any, make_fleet: FleetMaker, caplog: pytest.LogCaptureFixture) -> None:
    """With keys each route but health is 401 without one; a valid key opens them, and its tenant is logged."""

    async def scenario() -> None:
        key, entry = new_key("acme", tiers=["relaxed", "background"], default_tier="background")
        fleet = await make_fleet(silent, keys=[entry])
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        gate = await fleet.gate()
        for path, methods in ROUTES.items():
            for headers in ({}, {"authorization": "Bearer tg-wrong"}):
                answer = await ask(gate, methods[0], path.replace("{id}", "resp_1"), {}, headers=headers)
                if path.startswith("/health"):
                    assert answer.status == 200
                else:
                    assert answer.status == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"].startswith("Bearer")
        assert fleet.replicas.calls == []
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert (await ask(gate, "GET", "/v1/models", headers=headers)).status == 200
            for asked, tier in (({}, "background"), ({"priority": 0}, "relaxed")):
                answer = await fleet.post(CHAT, {**BODIES[CHAT], **asked}, headers=headers)
                assert (answer.status, answer.headers["x-tidegate-tier"]) == (200, tier)

    with caplog.at_level("INFO", logger="ray.serve.tidegate.access"):
        run(scenario())
    assert caplog.messages[-1].endswith(" acme")
    assert key_free(caplog.text)


def key_free(text: str) -> bool:
    """Whether no key stands in a text."""
    return "tg-" not in text


def test_rate_limits_over_http(run: Any, make_fleet: FleetMaker) -> None:
    """Each answer under a limit says what is left; over it 429 with Retry-After; other routes are free."""

    async def scenario() -> None:
        key, entry = new_key("acme", requests_per_minute=3, tokens_per_minute=1000)
        fleet = await make_fleet(silent, keys=[entry])
        fleet.replicas.scripts[:] = [says(fleet.ids("one two three"))]
        headers = {"authorization": f"Bearer {key}"}
        left = []
        for stream in (False, True, False):
            answer = await fleet.post(CHAT, {**BODIES[CHAT], "stream": stream}, headers=headers)
            assert answer.status == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        usage = answer.json()["usage"]
        spent = 1000 - int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 3 * usage["total_tokens"] - 2 <= spent <= 3 * usage["total_tokens"] + 1
        refused = await fleet.post(CHAT, BODIES[CHAT], headers=headers)
        assert refused.status == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-tidegate-reason"] == "rate_limit_requests"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(await fleet.gate(), "GET", "/v1/models", headers=headers)).status == 200
        assert len(fleet.replicas.calls) == 3

    run(scenario())


def test_tokens_of_several_sequences_are_charged(run: Any, make_fleet: FleetMaker) -> None:
    """The prompt is charged once, the tokens of each of n sequences as they come; debt refuses the next request."""

    async def scenario() -> None:
        levels = [{"name": "only", "tokens_per_minute": 100}]
        fleet = await make_fleet(silent, tiers={"levels": levels})
        fleet.replicas.scripts[:] = [says([600] * 40)]
        answer = await fleet.post(COMPLETIONS, {**BODIES[COMPLETIONS], "n": 3, "temperature": 1.0, "max_tokens": 40})
        assert answer.json()["usage"]["completion_tokens"] == 120
        assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
        refused = await fleet.post(COMPLETIONS, BODIES[COMPLETIONS])
        assert refused.headers["x-tidegate-reason"] == "rate_limit_tokens"
        assert 10 <= int(refused.headers["retry-after"]) <= 14  # 20 and the prompt's tokens, at 100 a minute

    run(scenario())


def test_openai_client_obeys_retry_after(run: Any, make_fleet: FleetMaker) -> None:
    """OpenAI's own client waits as long as Retry-After says, asks again and gets its answer."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=1)
        gate = await fleet.gate()
        times: list[float] = []
        waits: list[bytes | None] = []
        loop = asyncio.get_running_loop()

        async def timed(scope: Any, receive: Any, send: Any) -> None:
            times.append(loop.time())

            async def listen(message: Any) -> None:
                if message["type"] == "http.response.start":
                    waits.append(dict(message["headers"]).get(b"retry-after"))
                await send(message)

            await gate(scope, receive, listen)

        crowd = Crowd(fleet)
        await crowd.join("standard")
        http = openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(timed))
        async with openai.AsyncOpenAI(base_url="http://fleet/v1", api_key="any", http_client=http) as client:
            question = client.chat.completions.create(
                model=DEFAULT_MODEL_ID, messages=[{"role": "user", "content": "Hi"}]
            )
            request = asyncio.create_task(question)
            await until(lambda: waits)
            fleet.replicas.scripts[:] = [says(fleet.ids("at last"))]
            await crowd.go()
            answer = await request
        assert answer.choices[0].message.content == "at last"
        assert len(times) == 2
        assert times[1] - times[0] >= int(waits[0] or b"60")
        assert waits[1] is None

    run(scenario())


def test_python_handles_have_tiers(run: Any, make_fleet: FleetMaker) -> None:
    """A body's `priority` or `service_tier` and `tier=` of generate_tokens choose the tier; garbage is the default."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        api = await fleet.python()

        def tier() -> int:
            return fleet.replicas.calls[-1].submit.priority

        for more, expected in (
            *(({"priority": "critical"}, 0), ({"priority": 2}, 2), ({"service_tier": "flex"}, 3)),
            *(({}, 1), ({"priority": ["x"], "service_tier": 3}, 1)),
        ):
            await api.chat({**BODIES[CHAT], **more})
            assert tier() == expected
            async for _ in api.complete_stream({**BODIES[COMPLETIONS], **more}):
                pass
            assert tier() == expected
        for given, expected in (("background", 3), (0, 0), ("what", 1), (None, 1)):
            tokens = await api.generate_tokens([504], {"max_tokens": 5, "tier": given})
            assert tokens["token_ids"][-1] == END
            assert tier() == expected

    run(scenario())


def test_python_handles_meet_the_tiers_bounds(run: Any, make_fleet: FleetMaker) -> None:
    """Limits and queue bounds of a tier refuse a handle's call with the same codes as HTTP."""

    async def scenario() -> None:
        levels = [{"name": "high", "requests_per_minute": 1}, {"name": "low", "max_queued": 1}]
        fleet = await make_fleet(silent, tiers={"levels": levels, "default": "low"})
        api = await fleet.python()
        waiting = asyncio.create_task(api.generate_tokens([504], {}))
        await until(lambda: fleet.replicas.calls)
        codes = []
        for call in (api.chat(BODIES[CHAT]), api.generate_tokens([504], {}), api.complete(BODIES[COMPLETIONS])):
            with pytest.raises(RequestRefused) as refused:
                await call
            assert refused.value.status == 429
            codes.append(refused.value.error["code"])
        assert codes == ["tier_queue_full"] * 3
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        await api.chat({**BODIES[CHAT], "priority": "high"})
        with pytest.raises(RequestRefused) as refused:
            await api.chat({**BODIES[CHAT], "priority": "high"})
        assert refused.value.error["code"] == "rate_limit_exceeded"
        waiting.cancel()

    run(scenario())


def test_oracle_hint_reaches_the_replica(run: Any, make_fleet: FleetMaker) -> None:
    """`vllm_xargs.tidegate_output_tokens` of a request arrives beside the submission's ticket."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        await fleet.post(CHAT, {**BODIES[CHAT], "vllm_xargs": {"tidegate_output_tokens": 12, "a": "b"}})
        extra = fleet.replicas.calls[0].params.extra_args
        assert extra["a"] == "b"
        assert extra["tidegate"]["output_tokens"] == 12
        assert extra["tidegate"]["ticket"]

    run(scenario())
