"""Measures of one policy, of several beside each other, and of a reward model. docs/measures.md says what each is."""
