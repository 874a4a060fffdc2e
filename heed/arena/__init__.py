"""Live policies for the arena, in processes of their own."""
