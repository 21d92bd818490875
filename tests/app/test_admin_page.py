"""The status page in a real browser over a scripted fleet: it shows the JSON's facts, and acts only with the token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .admin_rig import TOKEN, Rig, row
from .browser import DESKTOP, PHONE, Watched, opened

pytestmark = pytest.mark.slow


def clean(watched: Watched) -> None:
    """Nothing in the console, nothing asked of another host."""
    assert watched.said == []
    assert watched.foreign == []


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")])
def test_it_draws_what_the_json_says(url: str, size: tuple[int, int], scheme: Any) -> None:
    """Replicas, blocks by tier, headroom lines, moves, totals and events are those of /status.json, at each width."""
    status = httpx.get(f"{url}/status.json").json()
    with opened(url, size, scheme) as watched:
        page = watched.page
        for replica in status["replicas"]:
            drawn = page.locator(f'#fleet [data-replica="{replica["id"]}"]')
            blocks = [int(layer.get_attribute("data-blocks") or 0) for layer in drawn.locator("[data-tier]").all()]
            assert blocks == [tier["blocks"] for tier in replica["tiers"]]
            used = sum(float(rect.get_attribute("height") or 0) for rect in drawn.locator("rect.layer").all())
            assert used == pytest.approx(150 * replica["used_blocks"] / replica["total_blocks"], abs=0.01)
            line = drawn.locator("line[data-headroom]")
            assert float(line.get_attribute("data-headroom") or 0) == replica["headroom_blocks"]
            assert f"{replica['running']} running" in (drawn.text_content() or "")
            cells = page.locator(f'#replicas [data-row="{replica["id"]}"] > *').all_text_contents()
            running, waiting, blocks_used = cells[3:6]
            assert (cells[1], waiting) == (replica["state"], str(replica["waiting"]))
            assert running == f"{replica['running']} / {replica['max_num_seqs']}"
            assert blocks_used.startswith(f"{replica['used_blocks']} / {replica['total_blocks']}, ")
        (move,) = status["moving"]
        assert page.locator(f'[data-move="{move["source"]}>{move["destination"]}"]').count() == 1
        for name in ("running", "waiting"):
            shown = page.locator(f'[data-total="requests {name}"] dd').text_content() or ""
            assert shown.strip() == str(status["totals"][name])
        assert page.locator("#events li span").all_text_contents() == [event["text"] for event in status["events"]]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
        clean(watched)


def test_it_follows_the_fleet(rig: Rig, url: str) -> None:
    """A replica that comes and one that goes are on the page without a reload."""
    with opened(url) as watched:
        rig.coordinator.rows["new00001"] = row(running=3, running_by_tier=[0, 3], blocks_by_tier=[0, 12])
        del rig.coordinator.rows["k3x9q1ab"]
        watched.page.wait_for_selector('#fleet [data-replica="new00001"]')
        watched.page.wait_for_selector('#fleet [data-replica="k3x9q1ab"]', state="detached")
        assert watched.page.locator("#replicas tbody tr").count() == 3
        clean(watched)


def test_drain_with_the_token(rig: Rig, url: str) -> None:
    """The button is off without a token; with it the replica drains, the page says so, and the way back is offered."""
    with opened(url) as watched:
        button = watched.page.locator('button[data-drain="z1p8r4ef"]')
        assert button.is_disabled()
        watched.act(TOKEN)
        button.click()
        watched.page.wait_for_selector('#fleet [data-replica="z1p8r4ef"].draining')
        assert rig.coordinator.rows["z1p8r4ef"]["state"] == "draining"
        assert button.text_content() == "Undrain"
        button.press("Enter")  # by keyboard too
        watched.page.wait_for_selector('#fleet [data-replica="z1p8r4ef"].serving')
        clean(watched)


def test_a_wrong_token_is_refused(rig: Rig, url: str) -> None:
    """The page says why nothing happened, and nothing did."""
    with opened(url) as watched:
        watched.act("a-wrong-token-of-some-length")
        watched.page.click('button[data-drain="z1p8r4ef"]')
        watched.page.wait_for_selector("#said.bad")
        assert "the token is wrong" in (watched.page.text_content("#said") or "")
        assert rig.coordinator.rows["z1p8r4ef"]["state"] == "serving"


def test_alpha_changes_live(rig: Rig, url: str) -> None:
    """Another alpha typed in and applied is the application's user_config, and the page then shows it as in force."""
    with opened(url) as watched:
        watched.act(TOKEN)
        watched.page.click('summary:has([data-now="scheduling"])')
        watched.page.fill('#scheduling input[name="alpha"]', "2.5")
        watched.page.click('#scheduling button[type="submit"]')
        watched.page.wait_for_selector("#said.good")
        assert rig.serve.user_config["scheduling"]["alpha"] == 2.5
        watched.page.wait_for_selector('[data-now="scheduling"]:has-text("alpha 2.5")')
        watched.page.fill('#scheduling input[name="alpha"]', "-3")
        watched.page.click('#scheduling button[type="submit"]')
        watched.page.wait_for_selector("#said.bad")
        assert rig.serve.user_config["scheduling"]["alpha"] == 2.5


def test_it_says_that_the_coordinator_is_away(rig: Rig, url: str) -> None:
    """Last known facts stay on the page, under a notice that says how old they are."""
    with opened(url) as watched:
        rig.coordinator.away = RuntimeError("the actor died")
        watched.page.wait_for_selector("#notice:not([hidden])")
        assert "The coordinator does not answer (the actor died)" in (watched.page.text_content("#notice") or "")
        assert watched.page.locator("#replicas tbody tr").count() == 3


def test_what_a_replica_says_is_text(rig: Rig, url: str) -> None:
    """Markup in a name or an event is shown, not run."""
    evil = '<img src=x onerror="document.title=1">'
    rig.coordinator.rows[evil] = row()
    rig.coordinator.events.note("order", 0.0, evil)
    with opened(url) as watched:
        watched.page.wait_for_selector("#events li")
        assert watched.page.locator("#events li span").first.text_content() == evil
        assert watched.page.locator("img").count() == 0
        assert watched.page.title() == "Tidegate"


def test_accessible(url: str) -> None:
    """The picture has a text, the table heads and scopes, each field a name, and motion stops where it is unwanted."""
    with opened(url, reduced_motion="reduce") as watched:
        page = watched.page
        assert "84 % of its KV cache used" in (page.text_content("#fleet-text") or "")
        assert page.locator("#replicas thead th:not([scope=col])").count() == 0
        assert page.locator("#replicas tbody th[scope=row]").count() == 3
        fields = "[...document.querySelectorAll('input, select, button')]"
        nameless = f"{fields}.filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).length"
        assert page.evaluate(nameless) == 0
        assert page.evaluate("document.getAnimations().length") == 0
        assert page.evaluate(f"({CONTRAST})()") == []


#: Texts whose contrast to the first opaque background behind them is under 4.5 (WCAG 2.2, 1.4.3).
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.matches('script, style, noscript, .unseen, .skip, :disabled, :disabled *')) continue;
    if (e.closest('svg, [hidden], details:not([open]) > form')) continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(`${e.tagName}.${e.className}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return bad;
}"""
