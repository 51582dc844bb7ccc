"""`python -m bench accuracy`: the tasks that the project trains."""
