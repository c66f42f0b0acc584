"""The processes of an instance: the supervisor starts, watches, replaces and stops them, and publishes the members."""
