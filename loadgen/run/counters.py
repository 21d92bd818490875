"""What the server counted meanwhile: differences of its Prometheus counters, preemptions and migrations above all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import aiohttp
import msgspec

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)
#: vLLM's, the fleet's, and the same by way of Ray's metrics agent, which puts `ray_` before them.
WANTED = re.compile(
    r"^(?:ray_)?(?:vllm[:_]num_preemptions|vllm[:_]prefix_cache_(?:hits|queries)|vllm[:_]request_success"
    r"|tidegate_\w+?)(?:_total)?$"
)

#: Seconds until a count shows on the pages of Ray's metrics agents: workers report every 10 s.
RAY_LATE_S = 11.0

Counters = dict[str, float]


class _Targets(msgspec.Struct):
    targets: list[str]


def pages(places: Iterable[str]) -> tuple[list[str], float]:
    """URLs of the pages, and seconds until what was counted shows on them.

    A place is a URL, or the file of targets that Ray keeps for Prometheus (prom_metrics_service_discovery.json in its
    session's folder). ValueError if it is neither.
    """
    urls, late = [], 0.0
    for place in places:
        if place.startswith(("http://", "https://")):
            urls.append(place)
            continue
        try:
            listed = msgspec.json.decode(Path(place).read_bytes(), type=list[_Targets])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"metrics-url: {place!r} is no URL and no list of Prometheus targets: {error}") from None
        urls += [f"http://{target}/metrics" for group in listed for target in group.targets]
        late = RAY_LATE_S
    return urls, late


def parse(text: str) -> Counters:
    """Counters of a Prometheus page that we want, summed over their labels; those of histograms are left out."""
    found: Counters = {}
    for name, value in LINE.findall(text):
        if name.endswith("_total") and WANTED.match(name):
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
    return found


async def scrape(session: aiohttp.ClientSession, urls: list[str]) -> Counters | None:
    """Sum of the counters of all pages; None if not one of them can be had."""
    total: Counters = {}
    had = False
    for url in urls:
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
                if response.status != 200:
                    continue
                counters = parse(await response.text())
        except (TimeoutError, aiohttp.ClientError, UnicodeDecodeError):
            continue
        had = True
        for name, value in counters.items():
            total[name] = total.get(name, 0.0) + value
    return total if had else None


def difference(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> Counters | None:
    """What was counted between; None if there is nothing to compare. A counter that fell began anew: 0."""
    if before is None or after is None:
        return None
    return {name: max(0.0, value - before.get(name, 0.0)) for name, value in sorted(after.items())}
