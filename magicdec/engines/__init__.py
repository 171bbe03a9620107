"""Who decodes: the native engine, and adapters to peers."""
