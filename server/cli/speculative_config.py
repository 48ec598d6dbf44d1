"""``--speculative-config``: vLLM's names for how to speculate, as this engine's settings.

The names are those of vLLM's ``SpeculativeConfig`` (vllm/config/speculative.py), with one method more: ``hybrid``.
What cannot be honoured is refused by name and never passed over.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.engine.settings import DRAFT_SAMPLE_METHODS, QUANTIZATIONS, REJECTION_SAMPLE_METHODS

MAX_DRAFT_TOKENS = 64

# Method: the drafter that it names here.
METHODS = {
    "ngram": "suffix",  # a suffix match is an n-gram match without a longest n
    "suffix": "suffix",
    "draft_model": "model",
    "eagle": "model",
    "eagle3": "model",
    "hybrid": "hybrid",
}
_OTHER_METHODS = {
    "ngram_gpu": "it matches on a GPU; take ngram or suffix",
    "medusa": "Medusa heads are not read; take eagle3 or draft_model",
    "mlp_speculator": "MLP speculators are not read; take eagle3 or draft_model",
    "dflash": "block-diffusion drafts are not read; take eagle3 or draft_model",
    "dspark": "block-diffusion drafts are not read; take eagle3 or draft_model",
    "mtp": "the multi-token layers of a model are not read; take hybrid or suffix",
    "custom_class": "classes of your own are not loaded; take hybrid or suffix",
    "extract_hidden_states": "it drafts nothing; features are extracted by outrider distill",
}

# Fields that stand for what is not here: why, and the values that ask for nothing.
_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "attention_backend": ("the draft runs on the target's kernels (--kernels)", ()),
    "code_revision": ("no code is ever loaded with a model", ()),
    "draft_load_config": ("a draft is loaded as the target is", ()),
    "draft_model_config": ("vLLM fills it in itself", ()),
    "draft_parallel_config": ("vLLM fills it in itself", ()),
    "draft_tensor_parallel_size": ("a model runs on one device here", (1,)),
    "dspark_draft_topk": ("DSpark drafts are not read", ()),
    "index_share_for_mtp_iteration": ("multi-token layers are not read", ()),
    "kv_cache_dtype": ("the draft's keys and values lie in the target's pages (--kv-cache-dtype)", ("auto",)),
    "max_model_len": ("a draft follows its target to the end of the context (--max-context)", ()),
    "moe_backend": ("mixtures of experts are not read", ("auto",)),
    "num_speculative_tokens_per_batch_size": ("the controller decides by what passes cost on this machine", ()),
    "parallel_drafting": ("drafts are made token by token", (False,)),
    "revision": ("fetch that revision and give its directory as 'model'", ()),
    "suffix_decoding_max_tree_depth": ("a match may be of any length", ()),
    "suffix_decoding_max_spec_factor": ("the controller decides how far to guess", ()),
    "suffix_decoding_min_token_prob": ("the controller decides which guesses pay", ()),
    "synthetic_acceptance_length": ("invented acceptance changes the answer", ()),
    "synthetic_acceptance_rates": ("invented acceptance changes the answer", ()),
    "target_model_config": ("vLLM fills it in itself", ()),
    "target_parallel_config": ("vLLM fills it in itself", ()),
    "tensor_parallel_size": ("a model runs on one device here", ()),
    "use_heterogeneous_vocab": ("a draft must have the target's vocabulary", (False,)),
    "use_local_argmax_reduction": ("a model runs on one device here", (False,)),
}
# Fields that say how vLLM works inside. Either value leaves everything here as it is.
_WITHOUT_EFFECT = frozenset({"disable_eagle_block_drop", "disable_padded_drafter_batch", "enforce_eager"})


class InvalidSpeculativeConfig(ValueError):
    """A configuration that cannot be honoured; a sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """``settings``: fields of ``EngineSettings``. ``model``: the draft, as ``--model`` names models; None: not said."""

    settings: Mapping[str, Any]
    model: str | None = None


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Raises:
    InvalidSpeculativeConfig: no JSON object, an unknown name, a wrong value, or something that is not built.
    """
    fields = _read(text)
    for name, value in fields.items():
        _check_name(name, value)
    method = _method(fields)
    model = _typed(fields, "model", str, "a directory, a .gguf file or a hub id such as org/name")
    drafter = METHODS.get(method or "")
    if drafter is None and not model:
        raise InvalidSpeculativeConfig(f"it needs a 'method' (one of {', '.join(METHODS)}) or a 'model'")
    if drafter == "suffix" and model:
        raise InvalidSpeculativeConfig(
            f"the method {method} has no model: leave 'model' out, or take the method hybrid, which uses both"
        )
    settings = {
        "drafter": drafter or "hybrid",  # vLLM, too, drafts with a model that is named without a method
        "max_draft_tokens": _count(fields, "num_speculative_tokens"),
        "suffix_min_match": _shortest_match(fields, drafter or "hybrid"),
        "suffix_history": _keeps_history(fields),
        "draft_quantize": _choice(fields, "quantization", QUANTIZATIONS),
        "draft_sample_method": _choice(fields, "draft_sample_method", DRAFT_SAMPLE_METHODS),
        "rejection_sample_method": _rejection_sample_method(fields),
        "adaptive_drafts": _typed(fields, "enable_adaptive_verification", bool, "true or false"),
    }
    return SpeculativeConfig({name: value for name, value in settings.items() if value is not None}, model)


_READ = frozenset(
    {
        "method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "quantization",
        "suffix_decoding_max_cached_requests", "draft_sample_method", "rejection_sample_method",
        "enable_adaptive_verification",
    }
)  # fmt: skip


def _read(text: str) -> dict[str, Any]:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise InvalidSpeculativeConfig(f"it gives {name!r} twice; give it once")
            values[name] = value
        return values

    example = """such as '{"method": "hybrid", "num_speculative_tokens": 8}'"""
    try:
        fields = json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise InvalidSpeculativeConfig(
            f"it is not JSON ({error.msg} at character {error.pos}); give one object in quotes of the shell, {example}"
        ) from None
    except RecursionError:
        raise InvalidSpeculativeConfig(f"it is nested too deeply; give one flat object, {example}") from None
    if not isinstance(fields, dict):
        raise InvalidSpeculativeConfig(f"it must be a JSON object, {example}, not {_show(fields)}")
    return fields


def _check_name(name: str, value: object) -> None:
    if name in _WITHOUT_EFFECT:
        _typed({name: value}, name, bool, "true or false")
        return
    if name in _READ:
        return
    if name not in _REFUSED:
        known = sorted({*_READ, *_WITHOUT_EFFECT, *_REFUSED})
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"what is read: {', '.join(sorted(_READ))}"
        raise InvalidSpeculativeConfig(f"it has the unknown field {_show(name)}; {hint}")
    why, harmless = _REFUSED[name]
    if value is not None and not any(value == other and type(value) is type(other) for other in harmless):
        raise InvalidSpeculativeConfig(f"{name!r} is not supported: {why}; leave it out")


def _typed(fields: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not kind or value == "":
        raise InvalidSpeculativeConfig(f"{name!r} must be {expected}, not {_show(value)}")
    return value


def _choice(fields: Mapping[str, Any], name: str, choices: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(value, [*choices], n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidSpeculativeConfig(f"{name!r} must be one of {', '.join(choices)}, not {_show(value)}{hint}")
    return value


def _method(fields: Mapping[str, Any]) -> str | None:
    named = fields.get("method")
    if isinstance(named, str):
        why = _OTHER_METHODS.get("mtp" if named.endswith("_mtp") else named)
        if why is not None:
            raise InvalidSpeculativeConfig(f"the method {named} is not supported: {why}")
    return _choice(fields, "method", METHODS)


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= MAX_DRAFT_TOKENS:
        raise InvalidSpeculativeConfig(f"{name!r} must be from 1 to {MAX_DRAFT_TOKENS}, not {_show(value)}")
    return value


def _shortest_match(fields: Mapping[str, Any], drafter: str) -> int | None:
    """The fewest tokens that must repeat. One bound alone stands for both, as in vLLM.

    A longer match than ``prompt_lookup_max`` is a match of that length too, so a guess is made in the same places.
    """
    lowest, highest = _count(fields, "prompt_lookup_min"), _count(fields, "prompt_lookup_max")
    if lowest is not None and highest is not None and lowest > highest:
        raise InvalidSpeculativeConfig(
            f"'prompt_lookup_min' is {lowest} and 'prompt_lookup_max' {highest}: the first must not be larger"
        )
    shortest = highest if lowest is None else lowest
    if shortest is not None and drafter == "model":
        raise InvalidSpeculativeConfig(
            "'prompt_lookup_min' and 'prompt_lookup_max' are of the methods ngram, suffix and hybrid: "
            "leave them out, or take one of these"
        )
    return shortest


def _keeps_history(fields: Mapping[str, Any]) -> bool | None:
    name = "suffix_decoding_max_cached_requests"
    if fields.get(name) is None:
        return None
    if type(fields[name]) is not int or fields[name] != 0:
        raise InvalidSpeculativeConfig(
            f"{name!r} can only be 0 (none), not {_show(fields[name])}: what is kept of earlier answers is bounded "
            "by memory and not by number; leave the field out, and ask for it with --suffix-history"
        )
    return False


def _rejection_sample_method(fields: Mapping[str, Any]) -> str | None:
    name = "rejection_sample_method"
    if fields.get(name) == "synthetic":
        raise InvalidSpeculativeConfig(
            f"{name!r} synthetic is not supported: invented acceptance changes the answer; take standard or block"
        )
    return _choice(fields, name, REJECTION_SAMPLE_METHODS)


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
