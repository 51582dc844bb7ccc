"""`python -m bench workloads`: models of other packages, trained in every way."""
