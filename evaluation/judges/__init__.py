"""The judges of a comparison: scorers, language models, people, external judgments."""
