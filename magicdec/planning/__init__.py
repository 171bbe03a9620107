"""From a configuration to a plan, and from a plan to objects."""
