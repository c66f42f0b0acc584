"""Load of the experts of each layer, read from the engines' newest reports at each scrape.

The text is written here, because there is a line for each expert of each layer, ten thousand and more for a large
model, and the library takes about twenty times as long for a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from eagleray.messages.outputs import ExpertLoad

TOKENS = "eagleray:expert_tokens_total"
BALANCE = "eagleray:expert_balance"
HEADS = {
    TOKENS: f"# HELP {TOKENS} Tokens that were given to each expert.\n# TYPE {TOKENS} counter\n",
    BALANCE: f"# HELP {BALANCE} Mean over maximum of the experts' tokens: 1 is even.\n# TYPE {BALANCE} gauge\n",
}


class ExpertText:
    """Collector that omits engines without a report, because their model may have no experts."""

    def __init__(self, model_name: str, loads: Callable[[], Iterable[ExpertLoad]]) -> None:
        self._model_name = _escaped(model_name)
        self._loads = loads

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        # The newest incarnation is the last of its rank: two series of one name would spoil the whole scrape.
        in_order = sorted(self._loads(), key=lambda load: (load.engine.rank, load.engine.incarnation))
        loads = {load.engine.rank: load for load in in_order}.values()
        if not loads:
            return ""
        tokens = "".join(line for load in loads for line in self._tokens(load))
        balances = "".join(line for load in loads for line in self._balances(load))
        return HEADS[TOKENS] + tokens + HEADS[BALANCE] + balances

    def _tokens(self, load: ExpertLoad) -> Iterator[str]:
        for labels, counts in zip(self._labels(load), load.counts.tolist(), strict=True):
            for expert, count in enumerate(counts):
                yield f'{TOKENS}{{{labels},expert="{expert}"}} {count}\n'

    def _balances(self, load: ExpertLoad) -> Iterator[str]:
        for labels, counts in zip(self._labels(load), load.counts, strict=True):
            most = counts.max()
            yield f"{BALANCE}{{{labels}}} {counts.mean() / most if most else 1.0:.6g}\n"

    def _labels(self, load: ExpertLoad) -> list[str]:
        """Return the labels of each layer."""
        engine = f'model_name="{self._model_name}",engine="{load.engine.rank}"'
        return [f'{engine},layer="{layer}"' for layer in range(len(load.counts))]


def _escaped(value: str) -> str:
    """Escape a label value for the text format."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
