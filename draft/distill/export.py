"""A trained head as a draft on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from outrider.draft.distill.distillation import TrainedHead
from outrider.draft.speculators import SpeculatorConfig, save_speculator
from outrider.verify.checkpoint.config import ModelConfig


def write_draft(path: Path, trained: TrainedHead, target: ModelConfig, target_name: str, chain: int) -> None:
    """Write the draft in the ``speculators`` format. ``chain``: guesses a step that its configuration proposes.

    Raises:
        OSError: a file cannot be written.
    """
    shape = trained.shape
    layers = replace(
        target,
        architecture="llama",
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        tie_word_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        sliding_layers=None,
    )
    config = SpeculatorConfig(
        layers=layers,
        draft_vocab_size=shape.draft_vocab_size,
        taps=trained.taps,
        target_hidden_size=target.hidden_size,
        target_name=target_name,
        target_architecture=_ARCHITECTURES[target.architecture],
        norm_before_residual=False,
        num_draft_tokens=chain,
    )
    try:
        save_speculator(path, config, trained.weights, trained.token_map)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(f"the draft's weights cannot be written: {error}") from error


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
