"""Pages made from result files."""
