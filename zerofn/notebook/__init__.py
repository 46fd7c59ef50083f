"""What people look at while a model trains: a line of figures, in a terminal or a notebook. Public names only."""
