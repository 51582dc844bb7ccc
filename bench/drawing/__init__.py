"""Drawing: shared by the reports of training steps."""
