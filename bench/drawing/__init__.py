"""Drawing: what the reports of training steps share."""
