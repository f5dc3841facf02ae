"""The dashboard and the metrics' page name what a live process exposes, and vLLM's names are vLLM's."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from coordinator.errors import ModelNotFound
from gateway.observing.metrics import families
from gateway.turns import TextPrompt, TurnRequest
from tests.unit.watched_service import PREFIX, turn, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.observing.metrics.families import Family
    from tests.unit.watched_service import Figures

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "dashboards/ringserve.json").read_text("utf-8"))

# As vLLM 0.33 exposes them. A name that is ours as well must be one of these.
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "generation_tokens_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "external_prefix_cache_queries_total": "counter",
    "external_prefix_cache_hits_total": "counter",
    "request_success_total": "counter",
    "spec_decode_num_drafts_total": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
}
_SELECTOR = re.compile(r"([\w:]+)\{([^}]*)\}")
_BY = re.compile(r"by \(([^)]*)\)")
_FUNCTIONS = {"sum", "avg", "max", "rate", "increase", "histogram_quantile", "by"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live() -> Figures:
    """A scrape of a process that has had turns, misses, an error and a host store."""
    async with watched(host_rows=500) as it:
        await it.run(turn("one two three", session="s", draft=True))
        with pytest.raises(ModelNotFound):
            await it.run(TurnRequest(TextPrompt("x"), model="other"))
        it.figures()  # a stage's idle share is that between two looks
        return it.figures()


def labels_of(live: Figures) -> dict[str, set[str]]:
    """By the names of samples, so that what a query may ask for is told from what it may not."""
    known: dict[str, set[str]] = {}
    for name, labels, _ in live.samples():
        known.setdefault(name, set()).update(labels)
    return known


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_every_query_asks_for_series_and_labels_that_there_are(live: Figures) -> None:
    known = labels_of(live)
    for title, query in queries():
        found = _SELECTOR.findall(query)
        assert found, title
        asked_by = {label.strip() for each in _BY.findall(query) for label in each.split(",")}
        for name, selector in found:
            assert name in known, f"{title}: no process exposes {name}"
            matched = {part.split("=")[0].strip(" !") for part in selector.split(",")}
            # A scraper adds the instance.
            missing = (matched | asked_by) - known[name] - {"instance"}
            assert not missing, f"{title}: {name} has no {missing}"
            assert '=~"$instance"' in selector
            assert name.startswith("process_") or 'model_name=~"$model_name"' in selector
        words = set(re.findall(r"[\w:]{4,}(?=[ ({])", query)) - {name for name, _ in found}
        assert words <= _FUNCTIONS, f"{title}: {words - _FUNCTIONS} without a selector"


def test_a_counter_is_asked_for_as_a_rate_and_a_gauge_as_it_is() -> None:
    rising = {PREFIX + family.exposed for family in families.ALL if family.kind == "counter"}
    for title, query in queries():
        for name, _ in _SELECTOR.findall(query):
            rises = name in rising or name.endswith(("_bucket", "_sum", "_count", "_total"))
            is_rate = f"rate({name}{{" in query or f"increase({name}{{" in query
            assert rises == is_rate, f"{title}: {name}"


def test_the_variables_are_those_that_the_queries_use(live: Figures) -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "model_name", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("model_name", "instance"):
        metric = re.match(r"label_values\(([\w:]+)", variables[name]["definition"])
        assert metric
        assert metric[1] in labels_of(live)
    everything = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?(\w+)\}?", everything)) - {"__rate_interval", "__all"}
    assert used == set(variables)


def test_every_panel_has_a_title_a_place_and_the_chosen_data_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or above)


def test_the_rows_go_from_what_users_feel_to_single_stages() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Users' latency", "Throughput", "Cache", "Ring health", "Each stage"]


def test_a_process_exposes_what_the_families_say_and_nothing_else(live: Figures) -> None:
    ours = {
        name.removeprefix(PREFIX): family
        for name, family in live.families.items()
        if name.startswith(PREFIX) and not name.endswith("_created")
    }
    assert ours.keys() == {family.name for family in families.ALL}
    for family in families.ALL:
        exposed = ours[family.name]
        assert (exposed.type, exposed.documentation) == (family.kind, family.help)
        labels = {"model_name", *family.labels, *(("le",) if family.buckets else ())}
        assert set().union(*(s.labels for s in exposed.samples)) == labels, family.name


def test_names_that_vllm_has_too_are_vllms() -> None:
    ours = {family.exposed: family.kind.value for family in families.ALL if family.vllm}
    assert ours == VLLM
    assert not {family.exposed for family in families.ALL if not family.vllm} & VLLM.keys()


def test_no_label_grows_with_what_clients_do() -> None:
    bounded = {"ring", "stage", "state", "reason", "finished_reason", "code", "version"}
    described = {*families.CACHE_CONFIG.labels}
    assert {label for family in families.ALL for label in family.labels} <= bounded | described


def row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
    vllm = "yes" if family.vllm else "–"
    return f"| `{family.exposed}` | {family.kind} | {labels} | {vllm} | {family.help} |"


@pytest.mark.parametrize("part", ["OF_TURNS", "AT_A_LOOK", "OF_EVENTS"])
def test_the_page_lists_every_metric_as_it_is(part: str) -> None:
    table = "\n".join(row(family) for family in getattr(families, part))
    page = (DOCS / "metrics.md").read_text("utf-8")
    assert f"|\n{table}\n\n" in page, f"docs/metrics.md should say:\n{table}"


def test_the_page_names_no_metric_that_is_not_there() -> None:
    page = (DOCS / "metrics.md").read_text("utf-8").split("### What other servers count")[0]
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(family.exposed for family in families.ALL)
