"""What a training step does, operator by operator. The part of planning that needs torch."""
