"""What a configuration costs and gives, before it runs."""
