"""Stage 2: supervised fine-tuning on demonstrations."""
