"""Built-in worlds for demos and tests: text, instructions, gold scorers, and scripted labelers with known noise."""
