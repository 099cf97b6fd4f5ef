"""Tokens and text: tokenizer, streamed decoding, chat formats."""
