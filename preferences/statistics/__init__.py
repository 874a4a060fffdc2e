"""What labels say of tasks and labelers: agreement, alpha, accuracy, habits, and how sure each figure is."""
