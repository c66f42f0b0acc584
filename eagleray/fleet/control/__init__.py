"""Control of an instance: pauses, sleep and weight updates, one operation at a time, on all engines.

`machine.Control` makes the decisions; `plane.ControlPlane` sends its messages and owns its timer.
"""
