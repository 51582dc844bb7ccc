"""`python -m bench advisor`: what the advisor's choices cost, against the best there were."""
