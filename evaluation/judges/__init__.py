"""Who judges two responses: scorers, a language model, people, external judgments."""
