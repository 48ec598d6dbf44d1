"""Checkpoints: weights, configuration, tokenizer and chat template, from Hugging Face directories and GGUF files."""
