"""Ways to train, each alone in a process, as a user's training is."""
