"""The status page in a real browser: what it shows, that it keeps up, and that it asks nobody else for anything."""

from __future__ import annotations

import asyncio
import os
import random
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.clock import SystemClock
from coordinator.config import SchedulerSettings
from coordinator.driver import RingDriver
from coordinator.router import Router
from fakering.model import FakeModel
from fakering.ring import FakeRing
from gateway.chat.byte_tokenizer import END, ByteTokenizer
from gateway.http.server import serve_http
from gateway.observing.sights import Sights
from gateway.safety.guard import OPEN, Caller, Guard
from gateway.service import GenerationService
from gateway.settings import HttpSettings
from tests.compat.http_client import Http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from coordinator.drafters import Drafter
    from tests.compat.browser import Browser

pytest.importorskip("selenium", reason="needs selenium, of the group dev")
from tests.compat import browser as browsers

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is one"),
]

# Where `make screenshot` wants the picture.
SCREENSHOT = "RINGSERVE_SCREENSHOT"
LANGUAGE = FakeModel(258, low=32, high=127, end_token=END)
LANES, MAX_ROWS = 6, 4096


class Prophet:
    """Drafts what the fake model will say, but for a few tokens: the model's text repeats nothing to draft from."""

    def __init__(self) -> None:
        self._context: list[int] = []

    def extend(self, tokens: Any) -> None:
        self._context.extend(tokens)

    def draft(self, guess: Any, limit: int) -> tuple[int, ...]:
        context = (*self._context, *guess)
        said = LANGUAGE.oracle(context, min(limit, 4))
        return tuple(each if (len(context) + n) % 5 else 33 for n, each in enumerate(said))

    def close(self) -> None:
        pass


def prophet(job: int, wake: Callable[[], object], tenant: str = "") -> Drafter:
    return Prophet()


@dataclass(frozen=True)
class Served:
    router: Router
    sights: Sights
    driver: RingDriver

    @asynccontextmanager
    async def http(self, port: int = 0, guard: Guard = OPEN) -> AsyncIterator[str]:
        """Each time a process's own: a service takes turns until its front drains."""
        service = GenerationService(
            "fake-model",
            self.router,
            ByteTokenizer(),
            SystemClock(),
            random.Random(1),
            (self.sights.turns,),
        )
        settings = HttpSettings(port=port, drain_s=1.0)
        async with serve_http(service, settings, self.sights, guard) as address:
            yield address


@asynccontextmanager
async def served(step_s: float = 0.0, row_s: float = 0.0) -> AsyncIterator[Served]:
    clock, sights = SystemClock(), Sights()
    ring = FakeRing(
        3, LANES, MAX_ROWS, vocab_size=258, language=LANGUAGE, step_s=step_s, row_s=row_s,
        host_rows=24 * MAX_ROWS,
    )  # fmt: skip
    driver = RingDriver("ring-0", ring, SchedulerSettings(), clock, prophet)
    router = Router([driver], session_limit=64)
    await driver.start(sights.loading.sink("ring-0"))
    try:
        yield Served(router, sights, driver)
    finally:
        await driver.stop()


class Talk:
    """One session that grows by a question and an answer each turn."""

    def __init__(self, address: str, name: str) -> None:
        self._client = Http(address)
        self._name = name
        self.messages = [{"role": "system", "content": f"You are {name}. " + "Be brief. " * 30}]

    async def turn(self, question: str, **more: Any) -> None:
        self.messages.append({"role": "user", "content": question})
        body = {"messages": self.messages, "temperature": 0, "max_tokens": 40, **more}
        status, _, answer = await self._client.post(
            "/v1/chat/completions", body, x_session_id=self._name
        )
        assert status == 200, answer
        said = answer["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": said})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsers.opened(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


async def shown(browser: Browser, address: str) -> None:
    await asyncio.to_thread(browser.open, f"http://{address}/")
    await asyncio.to_thread(browser.until, "document.querySelector('[data-state=live]')")


def rows(browser: Browser) -> list[list[str]]:
    return [re.split(r"\t|\n", line.replace("\n", "\t")) for line in browser.texts("#turns tr")]


async def test_it_shows_a_ring_its_lanes_and_its_turns_as_they_happen(browser: Browser) -> None:
    async with served() as site, site.http() as address:
        browser.look(1280, 900)
        browser.complaints(), browser.requested()
        await shown(browser, address)
        (empty,) = browser.texts("#no-turns pre")
        assert f"curl http://{address}/v1/chat/completions" in empty
        assert '"model":"fake-model"' in empty
        assert browser.texts(".stage .name") == ["stage 0", "stage 1", "stage 2"]
        assert browser.texts(".lane .state") == ["empty"] * LANES
        browser.run("window.mark = 'the same document'")

        alice, bob = Talk(address, "alice"), Talk(address, "bob")
        await alice.turn("What is a ring?")
        await bob.turn("And what is a lane?")
        await alice.turn("Why?")
        alice.messages[1]["content"] = "What was a ring?"
        await alice.turn("Why not?")
        await asyncio.to_thread(browser.until, "document.querySelectorAll('#turns tr').length == 4")
        assert browser.run("return window.mark") == "the same document"

        digest = {name: site.sights.turns.digest(name) for name in ("alice", "bob")}
        assert browser.texts("#turns .who") == [
            digest[n] for n in ("alice", "alice", "bob", "alice")
        ]
        shares = [int(share.split()[0]) for share in browser.texts("#turns .cached b")]
        # bob's begins otherwise; alice's last one differs near its beginning.
        assert shares[3] == 0
        assert shares[1] > 80
        assert 0 < shares[0] < shares[1]
        why = browser.texts("#turns .why")
        assert why[3] == why[2] == "first turn of its session"
        assert why[1] == ""
        assert re.fullmatch(r"differs from token \d+ on, in messages\[1\]", why[0])
        held = dict(zip(browser.texts(".lane .chip"), browser.texts(".lane .rows"), strict=False))
        assert set(held) == set(digest.values())
        assert all(re.fullmatch(r"[\d,]+ rows, \d+ % reused", said) for said in held.values())
        (drafts,) = browser.run(
            "return [...document.querySelectorAll('.figure')].map(f => f.innerText)"
            ".filter(text => text.startsWith('Drafts accepted'))"
        )
        assert re.search(r"[1-9]\d? ?%", drafts.replace("\n", " "))
        source = browser.driver.page_source
        assert "alice" not in source
        assert "What was a ring" not in source
        assert browser.complaints() == []
        asked = browser.requested()
        assert {f"http://{address}/", f"http://{address}/status/events"} <= set(asked)
        assert all(url.startswith((f"http://{address}/", "data:")) for url in asked), asked


async def test_a_session_has_one_colour_in_its_lane_and_in_its_turns(browser: Browser) -> None:
    async with served() as site, site.http() as address:
        browser.look(1280, 900)
        await shown(browser, address)
        for name in ("alice", "bob", "carol"):
            await Talk(address, name).turn("Hello")
        await asyncio.to_thread(browser.until, "document.querySelectorAll('#turns tr').length == 3")
        hues: dict[str, set[str]] = {}
        for chip in browser.find(".chip"):
            kinds = (chip.get_attribute("class") or "").split()
            hue = next(each for each in kinds if each.startswith("hue-"))
            hues.setdefault(chip.text, set()).add(hue)
        assert len(hues) == 3
        assert all(len(each) == 1 for each in hues.values())
        assert len(set.union(*hues.values())) == 3


CONTRASTS = """
const light = (rgb) => {
  const [r, g, b] = rgb.match(/[\\d.]+/g).slice(0, 3).map(Number)
    .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
return [...document.querySelectorAll("body *")]
  .filter(n => [...n.childNodes].some(c => c.nodeType == 3 && c.data.trim()) && n.offsetParent && n.checkVisibility())
  .map(n => [light(getComputedStyle(n).color), light(ground(n)), n.className + ": " + n.textContent.slice(0, 30)])
  .map(([a, b, what]) => [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), what]);
"""


@pytest.mark.parametrize("dark", [False, True])
async def test_all_of_its_text_can_be_read_in_the_light_and_in_the_dark(
    browser: Browser, dark: bool
) -> None:
    async with served() as site, site.http() as address:
        browser.look(1280, 900, dark=dark, still=True)
        await shown(browser, address)
        await Talk(address, "alice").turn("Hello")
        await asyncio.to_thread(browser.until, "document.querySelectorAll('#turns tr').length == 1")
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", ground)[0]) < 64) is dark
        found = browser.run(CONTRASTS)
        assert len(found) > 40
        assert [pair for pair in found if pair[0] < 4.5] == []
        assert browser.run("return document.getAnimations().length") == 0


@pytest.mark.parametrize("width", [1280, 820, 390, 320])
async def test_it_fits_the_screen(browser: Browser, width: int) -> None:
    async with served() as site, site.http() as address:
        browser.look(width, 900)
        await shown(browser, address)
        talk = Talk(address, "alice")
        for question in ("Hello", "Why?"):
            await talk.turn(question)
        await asyncio.to_thread(browser.until, "document.querySelectorAll('#turns tr').length == 2")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        outside = browser.run(
            "return [...document.querySelectorAll('main *')].filter(n => n.offsetParent)"
            ".filter(n => n.getBoundingClientRect().right > innerWidth).map(n => n.outerHTML)"
        )
        assert outside == []


async def test_it_says_that_the_connection_is_lost_and_comes_back_by_itself(
    browser: Browser,
) -> None:
    async with served() as site:
        browser.look(1280, 900)
        async with site.http() as address:
            await shown(browser, address)
            browser.run("window.mark = 'the same document'")
        lost = "document.querySelector('#connection[data-state=lost]')"
        await asyncio.to_thread(browser.until, lost)
        assert browser.texts("#connection") == ["connection lost, retrying"]
        assert browser.texts(".stage .name") == ["stage 0", "stage 1", "stage 2"]
        assert browser.run("return document.querySelector('main').className") == "stale"
        async with site.http(port=int(address.rpartition(":")[2])) as again:
            assert again == address
            live = "document.querySelector('#connection[data-state=live]')"
            await asyncio.to_thread(browser.until, live)
            assert browser.run("return document.querySelector('main').className") == ""
            assert browser.run("return window.mark") == "the same document"
    browser.complaints()  # of the attempts in between


class OneKey:
    def find(self, key: str) -> Caller | None:
        return Caller("ops") if key == "right" else None


async def test_it_asks_for_a_key_where_one_is_needed(browser: Browser) -> None:
    async with served() as site, site.http(guard=Guard(OneKey())) as address:
        browser.look(1280, 900)
        await asyncio.to_thread(browser.open, f"http://{address}/")
        for key, then in (
            ("wrong", "!document.getElementById('key-wrong').hidden"),
            ("right", "1"),
        ):
            form = "document.activeElement == document.getElementById('key')"
            await asyncio.to_thread(browser.until, form)
            assert browser.texts("#connection") == ["key needed"]
            (field,) = browser.find("#key")
            (button,) = browser.find("#key-form button")
            field.send_keys(key)
            button.click()
            await asyncio.to_thread(browser.until, then)
        live = "document.querySelector('#connection[data-state=live]')"
        await asyncio.to_thread(browser.until, live)
        assert browser.run("return document.getElementById('key-form').hidden")
        assert "Bearer $KEY" in browser.texts("#no-turns pre")[0]
        await asyncio.to_thread(browser.driver.refresh)
        await asyncio.to_thread(browser.until, live)
    browser.complaints()  # of the two refusals
    browser.run("sessionStorage.clear()")


async def test_it_is_lively_while_several_sessions_talk(browser: Browser) -> None:
    """Also draws the picture of the documents, of half a minute's talk."""
    wanted = os.environ.get(SCREENSHOT)
    async with served(step_s=0.004, row_s=0.0001) as site, site.http() as address:
        browser.look(1280, 1240)
        await shown(browser, address)
        rng = random.Random(3)
        talks = [Talk(address, f"agent-{n}") for n in range(7)]
        running = [asyncio.create_task(_talked(talk, rng)) for talk in talks]
        try:
            busy = "document.querySelectorAll('.lane[data-state=decode]').length > 2"
            await asyncio.to_thread(browser.until, busy)
            computes = (
                "[...document.querySelectorAll('.share')].every(s => parseInt(s.innerText) > 0)"
            )
            await asyncio.to_thread(browser.until, computes)
            if wanted:
                enough = "document.querySelector('.spark path').getAttribute('d').length > 560"
                await asyncio.to_thread(browser.until, f"{enough} && {busy}")
                await asyncio.to_thread(browser.screenshot, Path(wanted))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert browser.complaints() == []


async def _talked(talk: Talk, rng: random.Random) -> None:
    words = ("why", "what", "then", "look", "at", "this", "file")
    while True:
        if len(talk.messages) > 3 and rng.random() < 0.06:
            talk.messages[-2]["content"] += " (said otherwise)"
        question = " ".join(rng.choice(words) for _ in range(rng.randint(10, 90)))
        await talk.turn(question, max_tokens=rng.randint(30, 160))
        if sum(len(message["content"]) for message in talk.messages) > 3200:
            del talk.messages[1:]
