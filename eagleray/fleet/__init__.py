"""Which processes exist: started, watched, replaced and ended by the supervisor, which tells everybody who is there."""

from eagleray.fleet.supervisor import FLUSH_SECONDS, Supervisor

__all__ = ["FLUSH_SECONDS", "Supervisor"]
