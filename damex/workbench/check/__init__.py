"""Preparing datasets: check, browse, convert, merge and plan."""
