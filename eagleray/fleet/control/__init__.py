"""Control of an instance: pauses, sleep and weight updates, one operation at a time, on all engines.

`machine.Control` makes the decisions; `FleetState` passes it its events and carries out its effects.
"""
