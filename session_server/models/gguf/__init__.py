"""Read GGUF files: one file holds configuration, tokenizer and weights of a model."""
