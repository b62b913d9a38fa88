"""Convert text to tokens and back: tokenizer, chat template, incremental detokenization, stop
strings.

Nothing here knows sessions or the engine. User text never becomes a control token, and an answer's
token ids are never made from its text again.
"""
