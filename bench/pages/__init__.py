"""Pages made from result files: the README's tables, and reports."""
