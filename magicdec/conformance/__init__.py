"""Check what a policy and a draft must keep to: of a plugin, and in the tests of the package."""
