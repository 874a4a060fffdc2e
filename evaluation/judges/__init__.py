"""Who judges two responses: scorers, a language model, people, judgments made elsewhere."""
