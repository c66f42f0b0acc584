"""Progress of many requests where there is no terminal."""

from __future__ import annotations

from eagleray.progress import Progress


def test_progress_without_a_terminal_logs_a_line_every_ten_seconds(visible_log, caplog):
    now = 0.0
    progress = Progress("rows", 30, is_terminal=False, clock=lambda: now)
    with caplog.at_level("INFO"):
        for _ in range(25):
            now += 1.0
            progress.add_tokens(10, 20)
            progress.finish(failed=now == 15.0)
    assert [record.getMessage() for record in caplog.records] == [
        "10 of 30 rows finished; 10 tokens/s in, 20 out",
        "20 of 30 rows finished, 1 of them with errors; 10 tokens/s in, 20 out",
    ]


def test_progress_not_shown_logs_nothing(visible_log, caplog):
    now = 0.0
    with caplog.at_level("INFO"), Progress("rows", is_terminal=False, is_shown=False, clock=lambda: now) as progress:
        for _ in range(3):
            now += 20.0
            progress.finish()
    assert caplog.records == []
    assert progress.num_finished == 3
