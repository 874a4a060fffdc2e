"""Stage 1: a tokenizer and a language model from raw text."""
