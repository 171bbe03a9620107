"""The configuration: schema, rules, checks, loading and explanations of mistakes. No torch."""
