"""The command line: flags in, settings and exit codes out."""
