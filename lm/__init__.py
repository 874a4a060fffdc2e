"""The transformer core: model, tokenizer, chat template, generation. Pure torch; it knows no ranks."""
