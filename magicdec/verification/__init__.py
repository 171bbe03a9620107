"""Pure functions that decide which proposals are accepted."""
