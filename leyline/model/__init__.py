"""One MLA transformer, driven by its config; knows nothing of requests, slots' owners or text."""
