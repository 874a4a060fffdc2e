"""Built-in worlds: text, instructions, gold scorers, and scripted labelers with known noise."""
