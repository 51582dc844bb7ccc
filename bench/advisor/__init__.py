"""`python -m bench advisor`: cost of the advisor's choices, against the best choices."""
