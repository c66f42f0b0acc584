"""How workers compute one model together: who has which part, and the few operations between them."""

from eagleray.parallel.group import Group
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import Mesh
from eagleray.parallel.stages import Stages

__all__ = ["Group", "Groups", "Mesh", "OpenedGroups", "Stages"]
