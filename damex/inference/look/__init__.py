"""A look inside: which dataset's tokens went to which expert, as tables and a page."""
