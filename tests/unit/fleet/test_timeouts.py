"""Inequalities between the fleet's durations and those of other packages; docs/liveness.md gives the reasons."""

from __future__ import annotations

from eagleray.client.client import CONNECTION_POLL_SECONDS
from eagleray.cluster.timeouts import RELEASE_SECONDS
from eagleray.config.sections import ExecutionConfig
from eagleray.engine.timeouts import FAILURE_REPORT_SECONDS, RESTART_MARGIN_SECONDS
from eagleray.executor.timeouts import PEER_EXIT_SECONDS, PROCESS_STOP_SECONDS
from eagleray.fleet import timeouts
from eagleray.process import parent
from eagleray.server.timeouts import FLUSH_SECONDS
from eagleray.transport.timeouts import FIRST_HEARTBEAT_SECONDS, HEARTBEAT_INTERVAL_SECONDS, HEARTBEAT_LATE_SECONDS


def test_stop_timeout_covers_the_stop_of_workers():
    closed_queue_sigterm_and_sigkill = 3 * PROCESS_STOP_SECONDS
    assert closed_queue_sigterm_and_sigkill < timeouts.STOP_TIMEOUT_SECONDS


def test_stop_timeout_covers_the_last_bytes_of_an_api_server():
    assert FLUSH_SECONDS < timeouts.STOP_TIMEOUT_SECONDS


def test_stop_timeout_covers_the_exit_of_an_orphan():
    assert parent.ORPHAN_EXIT_SECONDS < timeouts.STOP_TIMEOUT_SECONDS


def test_actors_stop_timeout_covers_the_release_of_an_engine():
    assert RELEASE_SECONDS < timeouts.ACTORS_STOP_TIMEOUT_SECONDS < timeouts.DRIVER_STOP_TIMEOUT_SECONDS


def test_start_margin_covers_the_report_of_a_root_cause():
    assert PEER_EXIT_SECONDS + FAILURE_REPORT_SECONDS < timeouts.START_MARGIN_SECONDS


def test_restart_margin_of_an_expert_group_covers_the_longest_delay():
    assert timeouts.START_MARGIN_SECONDS + timeouts.MAX_ENGINE_DELAY_SECONDS < RESTART_MARGIN_SECONDS


def test_first_heartbeat_limit_is_longer_than_the_senders():
    assert FIRST_HEARTBEAT_SECONDS < timeouts.FIRST_HEARTBEAT_TIMEOUT_SECONDS


def test_heartbeat_timeout_default_is_several_heartbeats():
    assert ExecutionConfig().heartbeat_timeout > 3 * HEARTBEAT_INTERVAL_SECONDS + HEARTBEAT_LATE_SECONDS


def test_disconnect_grace_covers_the_reports_of_both_ends():
    assert CONNECTION_POLL_SECONDS < timeouts.DISCONNECT_GRACE_SECONDS
    assert timeouts.CONNECTION_POLL_SECONDS < timeouts.DISCONNECT_GRACE_SECONDS
