"""Chat templates: a conversation to the text a model was trained on. No torch here.

A template belongs to the model, so to the operator; it never comes from a request. It still runs in
jinja2's sandbox, where it can reach nothing but the messages. The surroundings are those transformers give.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.verify.checkpoint.checkpoint import is_gguf, not_a_checkpoint
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.json_files import read_json
from outrider.verify.checkpoint.tokenizer import MASK, Tokenizer

_SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ChatTemplateError(Exception):
    """The template cannot render these messages; the message says why."""


class ChatTemplate:
    """One model's template, compiled. ``source`` None: the contents of the messages, joined by newlines.

    ``special_tokens`` are the variables a template knows control tokens by (``bos_token``, ...).

    Raises:
        UnsupportedCheckpoint: the template is not valid Jinja.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = None if source is None else _environment().from_string(source)
        except TemplateError as error:
            raise UnsupportedCheckpoint(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where the assistant's answer begins.

        Each message has a ``role`` and a ``content``; what else is allowed, and in which order, the template says.

        Raises:
            ChatTemplateError: the template refuses the messages or fails on them.
        """
        if self._template is None:
            return "\n".join(str(message.get("content") or "") for message in messages)
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ChatTemplateError(f"the model's chat template does not take these messages: {error}") from error

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, add_generation_prompt: bool = True
    ) -> list[int]:
        """The token ids of ``render``, except that a control token spelled out in a message stays text.

        So a user who writes ``<|im_end|>`` has written ten characters and not ended a turn. Only the
        template makes control tokens.

        Raises:
            ChatTemplateError: as ``render``.
        """
        names = sorted((name for name in tokenizer.special_tokens if len(name) > 1), key=len, reverse=True)
        masked = [_mask(dict(message), names) for message in messages]
        return tokenizer.encode(self.render(masked, add_generation_prompt))


def load_chat_template(path: Path) -> ChatTemplate:
    """The template of a Hugging Face directory or a GGUF file; of a base model, which has none, the plain one.

    Raises:
        UnsupportedCheckpoint: ``path`` is no checkpoint, or its template is not valid.
    """
    if path.is_dir():
        settings = read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")
        return ChatTemplate(_huggingface_source(path, settings), _huggingface_special_tokens(settings))
    if is_gguf(path):
        from outrider.verify.checkpoint.gguf_metadata import read_header

        header = read_header(path)
        tokens = header.strings("tokenizer.ggml.tokens") or ()
        ids = {role: header.integer(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "unknown", "padding")}
        special = {_GGUF_ROLES[role]: tokens[i] for role, i in ids.items() if i is not None and 0 <= i < len(tokens)}
        return ChatTemplate(header.text("tokenizer.chat_template"), special)
    raise not_a_checkpoint(path)


_GGUF_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def _huggingface_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None or isinstance(source, str):
        return source
    raise UnsupportedCheckpoint(f"{path}: chat_template in tokenizer_config.json is no text")


def _huggingface_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for role in _SPECIAL_ROLES:
        token = settings.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[f"{role}_token"] = content
    return tokens


def _mask(value: Any, names: Sequence[str]) -> Any:
    """``value`` with every control token in its strings broken up, also one that the next text could complete."""
    if isinstance(value, Mapping):
        return {key: _mask(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for name in names:
        while name in value:  # again where occurrences overlapped
            value = value.replace(name, name[0] + MASK + name[1:])
    ends_in_part = any(value.endswith(name[:length]) for name in names for length in range(1, len(name)))
    return value + MASK if ends_in_part else value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's words for training; here its content and no more."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
