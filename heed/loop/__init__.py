"""The preference loop: rounds of collecting labels, reward model, policy and comparison, within a budget of labels."""
