"""Which processes exist: started, watched, replaced and ended by the supervisor, which tells everybody who is there."""
