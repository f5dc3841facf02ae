"""The status page: what operators see of a running process in a browser, and the same as JSON for their scripts."""
