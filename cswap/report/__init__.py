"""What was done, for people to read: tables, plots, pages."""
