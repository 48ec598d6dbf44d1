"""The HTTP side: health, models, metrics, and refusals that say what to do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect


@pytest.fixture
async def http(serve: Any) -> Any:
    async with serve() as (_, port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


async def test_health_says_what_state_the_engine_is_in(http: Any, engine: Any) -> None:
    answer = await http.get("/health")
    assert answer.status_code == 200
    assert answer.json()["engine"]["num_restarts"] == 1
    assert answer.json()["model"] == "echo"
    engine.state = "restarting"
    answer = await http.get("/health")
    assert (answer.status_code, answer.json()["engine"]["state"]) == (503, "restarting")
    assert answer.json()["status"] == "unavailable"


async def test_an_engine_that_makes_no_step_is_not_called_ready(http: Any, engine: Any) -> None:
    engine.last_step_age_s = 9.0  # a long step on a slow machine
    assert (await http.get("/health")).status_code == 200
    engine.last_step_age_s = 11.0
    answer = await http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "stalled")


async def test_models_lists_the_one_that_is_served(http: Any, engine: Any) -> None:
    listed = (await http.get("/v1/models")).json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["echo"])
    assert (await http.get("/v1/models/echo")).json() == listed["data"][0]
    missing = await http.get("/v1/models/org/name")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    engine.state = "starting"
    assert (await http.get("/v1/models")).json()["data"] == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/chat/completions", 404, "not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/responses", 426, "websocket_required"),
        ("POST", "/v1/responses", 405, "websocket_required"),
        ("DELETE", "/v1/responses", 405, "websocket_required"),
    ],
)
async def test_other_requests_get_a_json_error(http: Any, method: str, path: str, status: int, code: str) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert path in answer.json()["error"]["message"]


async def test_metrics_count_what_responses_did(http: Any) -> None:
    before = await samples(http)
    async with connect(f"ws://127.0.0.1:{http.base_url.port}/v1/responses") as websocket:
        await websocket.send(json.dumps({"type": "response.create", "input": "abcdefgh"}))
        while json.loads(await websocket.recv())["type"] != "response.completed":
            pass
        during = await samples(http)
    # eight tokens in steps of three: drafts of four, of which 2, 2 and 1 were accepted
    expected = {
        ("spec_decode_num_drafts_total", "suffix"): 3,
        ("spec_decode_num_draft_tokens_total", "suffix"): 12,
        ("spec_decode_num_accepted_tokens_total", "suffix"): 5,
        **{("spec_decode_num_draft_tokens_per_pos_total", str(i), "suffix"): 3 for i in range(4)},
        ("spec_decode_num_accepted_tokens_per_pos_total", "0", "suffix"): 3,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1", "suffix"): 2,
        "prompt_tokens_total": 8,
        "generation_tokens_total": 8,
        ("request_success_total", "stop"): 1,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 5,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "num_connections": 1,
    }
    assert {name: during[name] - before.get(name, 0) for name in expected} == expected
    # what the engine says of itself
    assert during["num_requests_running"] in (0, 1)
    assert during["kv_cache_usage_perc"] == pytest.approx(0.1)
    assert (during["num_preemptions_total"], during["prefix_cache_hits_total"]) == (2, 20)
    assert (during["prefix_cache_queries_total"], during["engine_restarts_total"]) == (50, 1)
    assert (during["spec_decode_draft_seconds_total"], during["spec_decode_verify_seconds_total"]) == (0.5, 1.5)


async def samples(http: Any) -> dict[Any, float]:
    """Every sample by its name without the prefix, or by name and label value."""
    text = (await http.get("/metrics")).text
    found: dict[Any, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("outrider:")
            assert name != sample.name
            labels = [value for label, value in sample.labels.items() if label != "le"]
            found[(name, *labels) if labels else name] = sample.value
    return found
