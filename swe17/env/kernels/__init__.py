"""Functions to make faster, and the bench that says whether they are."""
