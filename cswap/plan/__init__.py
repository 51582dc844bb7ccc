"""Planning: published systems and ours as policies, judged by one simulator. Needs no torch."""
