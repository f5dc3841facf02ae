"""The demo through the real ring: what it reports is what an independent count says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.prefixes import common_prefix
from gateway.cli.app import app
from gateway.cli.dialogue import SYSTEM, TOOLS, TURNS

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]


def _prompts(folder: Path, answers: list[list[int]]) -> list[list[int]]:
    """The turns' prompts by transformers alone; the answers stand in them with their own ids."""
    from transformers import AutoTokenizer

    from gateway.chat.tokenizer import load_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    head = load_tokenizer(folder).render((SYSTEM, TURNS[0]), TOOLS, {}, None)
    prompts = [list(head.token_ids)]
    for turn, answer in zip(TURNS[1:], answers, strict=False):
        closed = answer[-1] == tokenizer.eos_token_id
        seam = "\n" if closed else f"{tokenizer.eos_token}\n"
        said = f"{seam}<|im_start|>user\n{turn.content}<|im_end|>\n<|im_start|>assistant\n"
        rest = tokenizer.encode(said, add_special_tokens=False)
        prompts.append([*prompts[-1], *answer, *rest])
    return prompts


def test_the_demo_reuses_the_common_prefix_and_is_exact(smollm2_dir: Path) -> None:
    result = CliRunner(env=dict(os.environ)).invoke(app, ["demo", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    turns = report["turns"]
    assert report["token_exact"] is True
    assert (report["model"], report["stages"], len(turns)) == ("smollm2-135m-instruct", 2, 3)
    prompts = _prompts(smollm2_dir, [turn["token_ids"] for turn in turns])
    rows: list[int] = []
    for turn, prompt in zip(turns, prompts, strict=True):
        assert turn["prompt_tokens"] == len(prompt)
        assert turn["cached_prefix"] == min(common_prefix(rows, prompt), len(prompt) - 1)
        assert turn["prefilled_tokens"] == len(prompt) - turn["cached_prefix"]
        assert turn["token_ids"] == turn["cold_token_ids"]
        # The last token of an answer was sampled and never written to a row.
        rows = [*prompt, *turn["token_ids"][:-1]]
    for turn in turns[1:]:
        assert turn["cached_prefix"] > 1500
        assert turn["ttft_ms"] <= 0.25 * turn["cold_ttft_ms"]
