"""Live policies for the arena: processes that sample, and sampling an answer again."""
