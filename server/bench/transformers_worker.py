"""The process behind ``--baseline transformers``: JSON lines in, JSON lines out.

Run as ``python -m outrider.server.bench.transformers_worker PATH``. It first says
``{"ready": {…versions…}}`` or ``{"error": "…"}``; then for each line ``{"batch": [messages, …], "max_tokens": n}``
it generates greedily, as one padded batch in float32, and answers ``{"rows": [{num_input_tokens,
num_output_tokens, token_times_s}, …], "seconds": s}`` or ``{"error": "…"}``. It measures itself, so the pipe
costs it nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MISSING = (
    "the baseline needs transformers and accelerate, and {name} is not installed; "
    "get them with: pip install transformers accelerate"
)


class TokenTimes:
    """Passed to ``generate`` as its streamer: notes when each token of the batch was there."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, token_ids: Any) -> None:
        self.at.append(time.perf_counter())  # the first is the prompt

    def end(self) -> None:
        pass


class Baseline:
    def __init__(self, path: Path) -> None:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        options: dict[str, Any] = {"dtype": torch.float32}
        source, tokenizer_options = path, {}
        if path.is_file():
            source, tokenizer_options = path.parent, {"gguf_file": path.name}
            options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        load_tokenizer: Any = AutoTokenizer.from_pretrained  # Any: transformers' types are incomplete
        load_model: Any = AutoModelForCausalLM.from_pretrained
        self._tokenizer = load_tokenizer(source, padding_side="left", **tokenizer_options)
        self._model = load_model(source, **options).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self.versions = {
            "transformers": transformers.__version__,
            "accelerate": version("accelerate"),  # a GGUF file cannot be loaded without it
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "dtype": str(self._model.dtype),
        }

    def answer(self, batch: list[list[dict[str, str]]], max_tokens: int) -> dict[str, Any]:
        import torch

        start = time.perf_counter()
        inputs = self._tokenizer.apply_chat_template(
            batch, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        times = TokenTimes()
        with torch.inference_mode():
            output = self._model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=self._tokenizer.pad_token_id,
                streamer=times,
            )
        seconds = time.perf_counter() - start
        token_times_s = [at - start for at in times.at[1:]]
        ends = self._model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        rows = []
        for row, mask in zip(output[:, inputs["input_ids"].shape[1] :].tolist(), inputs["attention_mask"], strict=True):
            num_tokens = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))
            times_s = token_times_s[:num_tokens]
            rows.append(
                {"num_input_tokens": int(mask.sum()), "num_output_tokens": num_tokens, "token_times_s": times_s}
            )
        return {"rows": rows, "seconds": seconds}


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not end up in the channel

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    try:
        baseline = Baseline(Path(sys.argv[1]))
    except ModuleNotFoundError as error:
        say({"error": MISSING.format(name=error.name)})
        return
    except Exception as error:
        say({"error": f"transformers cannot load {sys.argv[1]}: {error}"})
        return
    say({"ready": baseline.versions})
    for line in sys.stdin:
        try:
            say(baseline.answer(**json.loads(line)))
        except Exception as error:
            say({"error": f"generate failed: {error}"})


if __name__ == "__main__":
    main()
