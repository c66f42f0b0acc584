"""Benchmarks: what to ask (`workload`), asking it (`load`, `offline`, `startup`, `scheduling`), and telling what came
of it (`figures`, `report`, `plot`). The command line drives them."""
