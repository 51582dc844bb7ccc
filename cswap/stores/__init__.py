"""Where encodings rest: the host tier and the disk tier."""
