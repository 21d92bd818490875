"""A fleet that may be empty: the first requests wait for the replica that they make start, and the last one goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .probe import Probe
from .servers import MODEL, Server, start_fleet, until, wait_ready

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MOST_WAITING = 3
TO_ZERO_S = 5.0
START_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def empty() -> Iterator[Server]:
    """A fleet of no replica, one at most, that three requests may wait for."""
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": TO_ZERO_S}
    server = start_fleet(
        1,
        "float32",
        engine_kwargs={"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20},
        deployment_config={"num_replicas": None, "autoscaling_config": scaling},
        ingress={"max_queued_requests": MOST_WAITING, "cold_start_s": START_WITHIN_S},
    )
    try:
        wait_ready(server, "/health/ready")
        yield server
    finally:
        left = server.stop()
    assert not left, left


@pytest.fixture(scope="module")
def probe(empty: Server) -> Iterator[Probe]:
    """Its Python handle."""
    made = Probe(empty)
    yield made
    made.close()


def engines(server: Server) -> int:
    """EngineCores that live."""
    return len(server.named("EngineCore"))


def test_from_zero_and_back_and_again(empty: Server, probe: Probe) -> None:
    """Ready without a replica; as many requests wait as may, one more is refused; idle it goes, and comes again."""
    assert engines(empty) == 0
    url, body = f"{empty.url}/v1/completions", {"model": MODEL, "prompt": "The tide", "max_tokens": 8, "temperature": 0}

    def ask(_: int = 0) -> httpx.Response:
        return httpx.post(url, json=body, timeout=2 * START_WITHIN_S)

    began = time.monotonic()
    with ThreadPoolExecutor(MOST_WAITING + 1) as pool:
        answers = list(pool.map(ask, range(MOST_WAITING + 1)))
    print(f"{time.monotonic() - began:.1f} s from none to the last answer")
    (refused,) = [answer for answer in answers if answer.status_code != 200]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) > 0
    (written,) = {text(answer) for answer in answers if answer is not refused}
    assert engines(empty) == 1

    print(f"{until(lambda: not probe.state() and not engines(empty), 60, 'no replica'):.1f} s from one to none")
    assert httpx.get(f"{empty.url}/health/ready").status_code == 200
    again = ask()
    assert (again.status_code, text(again)) == (200, written)


def text(answer: httpx.Response) -> str:
    """What the model wrote."""
    return answer.json()["choices"][0]["text"]
