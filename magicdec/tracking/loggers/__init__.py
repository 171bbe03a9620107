"""The trackers that runs are logged to: a module each, named like its option of `tracker`."""
