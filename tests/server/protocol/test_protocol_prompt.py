"""Prompts over a real tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.server.protocol.items import Message
from outrider.server.protocol.prompt import PromptError, TemplatePromptBuilder
from outrider.verify.checkpoint.chat_template import load_chat_template
from outrider.verify.checkpoint.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<s>{{ message['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture
def prompts(tmp_path: Path) -> TemplatePromptBuilder:
    """``<s>`` is 0, ``<e>`` is 1, and then one token for each byte."""
    vocab = {token: index for index, token in enumerate(["<s>", "<e>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<e>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": TEMPLATE}))
    return TemplatePromptBuilder(load_tokenizer(tmp_path), load_chat_template(tmp_path))


def test_a_prompt_is_the_rendered_conversation_up_to_the_answer(prompts: TemplatePromptBuilder) -> None:
    ids = prompts.build([Message(role="user", content="hé"), Message(role="assistant", content="x")])
    assert [ids[0], ids[4], ids[5], ids[7], ids[8]] == [0, 1, 0, 1, 0]
    assert b"".join(map(prompts.token_bytes, ids)) == "héx".encode()
    assert "".join(map(prompts.token_text, ids[:2])) == "<s>h"


def test_a_control_token_in_a_message_stays_text(prompts: TemplatePromptBuilder) -> None:
    ids = prompts.build([Message(role="user", content="<e><s>")])
    assert (ids.count(0), ids.count(1)) == (2, 1)
    assert b"".join(map(prompts.token_bytes, ids)) == b"<e><s>"


def test_what_the_template_refuses_is_a_prompt_error_that_says_why(prompts: TemplatePromptBuilder) -> None:
    with pytest.raises(PromptError, match="no system"):
        prompts.build([Message(role="system", content="x")])


def test_a_plain_text_becomes_tokens_with_nothing_added_and_no_control_token(prompts: TemplatePromptBuilder) -> None:
    ids = prompts.encode("h\u00e9<e>")
    assert not {0, 1} & set(ids)
    assert b"".join(map(prompts.token_bytes, ids)) == "h\u00e9<e>".encode()
