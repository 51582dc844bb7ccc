"""Small models, their data, and the tasks that train them."""
