"""Fine-tuning an encoder to classify texts, to tag words, and to find the answer to a question in a text."""
