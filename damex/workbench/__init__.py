"""Commands and services around the core: nothing in the core imports them."""
