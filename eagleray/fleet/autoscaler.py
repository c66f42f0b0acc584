"""The autoscaler: has the number of engines follow the load, by scaling operations of its own.

Pure: owned by `FleetState`, which passes in the reports of clients; they are its clock. What the load needs is decided
by `AutoscalePolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from eagleray.config.resolve import autoscale_limits
from eagleray.config.sections import Config
from eagleray.errors import EagleRayError
from eagleray.fleet.autoscaling import AutoscalePolicy, AutoscaleSettings, Decision
from eagleray.fleet.membership import Membership
from eagleray.fleet.scaling_operations import FleetChanges, ScalingOperation
from eagleray.fleet.timeouts import AUTOSCALE_DRAIN_SECONDS
from eagleray.fleet.turn import Turn
from eagleray.log import get_logger
from eagleray.messages.scaling import LoadReport, Scale

logger = get_logger(__name__)


def autoscale_settings(config: Config) -> AutoscaleSettings | None:
    """Return the settings of the autoscaler; None if the number of engines is fixed."""
    if (limits := autoscale_limits(config)) is None:
        return None
    return AutoscaleSettings(
        min_engines=limits[0],
        max_engines=limits[1],
        max_num_seqs=config.scheduling.max_num_seqs,
        target_queue=config.parallel.autoscale_target_queue,
        down_delay=config.parallel.autoscale_down_delay,
    )


class Autoscaler:
    """Begins an operation when the policy decides so and no other operation runs. `begin(operation_id, request)`
    begins an operation, or raises the reason why it may not begin."""

    def __init__(
        self,
        settings: AutoscaleSettings,
        *,
        begin: Callable[[str, Scale], ScalingOperation],
        changes: FleetChanges,
        membership: Membership,
        turn: Turn,
    ) -> None:
        self._settings = settings
        self._policy = AutoscalePolicy(settings)
        self._begin_operation = begin
        self._changes = changes
        self._membership = membership
        self._turn = turn
        self._operation: ScalingOperation | None = None
        """The operation that runs."""
        self._num_operations = 0
        self._last: tuple[float, Decision] | None = None
        """The last decision and its time."""
        self._error: str | None = None
        """Why the last decision could not be carried out; None if it could."""
        self._pause: str | None = None
        """Why nothing is decided now."""

    def set_max_num_seqs(self, number: int) -> None:
        """Record that engines run at most this many requests at the same time, which a restart may change."""
        if number != self._policy.settings.max_num_seqs:
            self._policy.settings = replace(self._policy.settings, max_num_seqs=number)

    def on_report(self, report: LoadReport, *, pause: str | None) -> None:
        """Handle a report, and change the number of engines if the load needs another one. `pause`: why this is not
        done now."""
        if report.client not in self._membership:
            return
        now = self._turn.now
        self._policy.record(report, now)
        self._check_operation()
        self._pause = pause
        if self._pause is not None:
            self._policy.hold(now)
            return
        num_engines = len(self._changes.ranks)
        if (decision := self._policy.decide(self._membership.engines, num_engines, now)) is not None:
            self._begin(num_engines, decision)

    def _begin(self, num_engines: int, decision: Decision) -> None:
        self._num_operations += 1
        operation_id = f"autoscale-{self._num_operations}"
        self._last = self._turn.now, decision
        if self._error is None:  # else it is a further attempt
            logger.info(
                "autoscaling from %d to %d engines (operation %s): %s",
                num_engines,
                decision.num_engines,
                operation_id,
                decision.reason,
            )
        try:
            request = Scale(num_engines=decision.num_engines, drain_timeout=AUTOSCALE_DRAIN_SECONDS)
            self._operation = self._begin_operation(operation_id, request)
        except EagleRayError as error:
            self._on_failure(error)

    def _check_operation(self) -> None:
        """See whether the operation has ended, and how."""
        if (operation := self._operation) is None or not operation.has_ended:
            return
        self._operation = None
        if operation.error is not None:
            self._on_failure(operation.error)
            return
        self._error = None
        self._policy.on_change(added=not operation.removed, now=self._turn.now)

    def _on_failure(self, error: EagleRayError) -> None:
        delay = self._policy.on_failure(self._turn.now)
        if (text := str(error)) != self._error:  # once for each reason, because attempts go on while the load lasts
            logger.warning(
                "the number of engines cannot follow the load: %s; the next attempt is in %.0f s", text, delay
            )
        self._error = text

    def describe(self) -> dict[str, Any]:
        """Describe the autoscaler for users."""
        last = None
        if self._last is not None:
            time, decision = self._last
            last = {
                "data_parallel_size": decision.num_engines,
                "reason": decision.reason,
                "seconds_ago": round(self._turn.now - time, 3),
            }
        return {
            "min": self._settings.min_engines,
            "max": self._settings.max_engines,
            "reason": self._pause or self._policy.reason,
            "last_decision": last,
            "last_error": self._error,
        }
