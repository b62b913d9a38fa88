"""The tokenizer of the embedded model."""

from __future__ import annotations

from session_server.demo import MODEL_DIR
from session_server.text.model_text import load_model_tokens

TOKENIZER = load_model_tokens(MODEL_DIR).tokenizer
EOS_TOKEN_IDS = load_model_tokens(MODEL_DIR).eos_token_ids
