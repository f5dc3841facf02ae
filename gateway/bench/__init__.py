"""What `ringserve bench` measures. Ratios of two things in one run, since absolute times belong to a machine."""
