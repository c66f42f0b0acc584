"""Which processes exist: started, watched and ended by the supervisor, which tells everybody who is there."""

from eagleray.fleet.supervisor import Supervisor

__all__ = ["Supervisor"]
