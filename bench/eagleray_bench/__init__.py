"""The benchmarks behind `eagleray bench`.

`workload` makes the requests; `load`, `offline`, `startup` and `scheduling` measure; `figures`, `report` and `plot`
present the results; `commands` reads the command line and drives them.
"""
