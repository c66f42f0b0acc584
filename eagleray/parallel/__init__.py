"""How workers compute one model together: who has which part, and the few operations between them."""

from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import Group, RowGroup
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import ONE_ENGINE, Engines, Mesh
from eagleray.parallel.stages import Stages

__all__ = ["ONE_ENGINE", "Engines", "ExpertGroup", "Group", "Groups", "Mesh", "OpenedGroups", "RowGroup", "Stages"]
