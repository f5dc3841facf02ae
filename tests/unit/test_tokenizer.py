"""The tokenizers behind the one interface: what the model's own files say, and the one without a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from coordinator.errors import InvalidValue, ModelUnusable
from gateway.chat.byte_tokenizer import END, START, ByteTokenizer
from gateway.chat.messages import Message, Tool, ToolCall
from gateway.chat.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.chat.tokenizer import ChatTokenizer

ASK = Message("user", "Weather in Zürich?")


def test_the_models_files_say_which_tokens_end_an_answer(
    smollm2: ChatTokenizer, smollm2_dir: Path, tmp_path: Path
) -> None:
    assert smollm2.stop_token_ids == {2}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(smollm2_dir / name)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    bare = load_tokenizer(tmp_path)
    assert bare.stop_token_ids == {0, 2, 7}
    with pytest.raises(InvalidValue, match="no chat template"):
        bare.render([ASK])
    assert bare.decode(bare.encode_prompt("plain text")) == "plain text"


def test_a_folder_without_a_tokenizer_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}'),
        ("chat_template.jinja", "\udcff"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [2, 1.5]}'),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}'),
    ],
)
def test_damaged_files_are_unusable_in_one_line_and_nobody_is_asked(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the terminal was asked")

    monkeypatch.setattr("builtins.input", ask)
    for kept in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / kept).symlink_to(smollm2_dir / kept)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ModelUnusable) as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_the_vocabulary_covers_every_id_that_is_special_or_encoded(smollm2: ChatTokenizer) -> None:
    assert smollm2.vocab_size == 49_152
    assert [i for i in range(20) if smollm2.is_special(i)] == list(range(17))


def test_the_byte_tokenizer_serves_chat_without_a_model() -> None:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.render(
        [
            Message("system", "You are terse."),
            ASK,
            Message("assistant", tool_calls=(ToolCall("weather", "{}"),)),
            Message("tool", "rain"),
        ],
        [Tool("weather")],
    )
    assert prompt.text.startswith("<|start|>system\nYou are terse.\n\n# Tools")
    assert prompt.text.endswith("<|end|>\n<|start|>assistant\n")
    assert max(prompt.token_ids) < tokenizer.vocab_size == 258
    assert tokenizer.decode(prompt.token_ids, skip_special=False) == prompt.text
    assert [prompt.token_ids[b] for b in prompt.boundaries] == [START] * 5
    assert tokenizer.stop_token_ids == {END}


def test_threads_may_render_at_once_and_get_what_one_thread_gets(smollm2: ChatTokenizer) -> None:
    talks = [[Message("user", f"question {i % 5} " * 50)] * (1 + i % 7) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(smollm2.render, talks))
    assert together == [smollm2.render(talk) for talk in talks]
