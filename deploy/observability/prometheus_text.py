"""What the processes of a run say of themselves at one moment, as Prometheus would read it.

Pure: text to numbers. Leaves out asking (`deploy.observability.run_client`) and what they mean
(`deploy.observability.top_model`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deploy.errors import InputError

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by the name of a sample and its labels."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at a run."""

    at: float
    """Epoch seconds on the machine that looks."""
    run: str
    processes: Mapping[str, Samples | None]
    """By name, as "actor-0", in the run's order; None where a process does not answer."""

    def value(self, name: str, process: str | None = None, **labels: str) -> float | None:
        """The sum of what carries the name and these labels; None where nothing does.

        Args:
            name: Of the sample, `_total` included.
            process: Only of this one.
            labels: Only with these.
        """
        wanted = frozenset(labels.items())
        found = [
            value
            for samples in self._of(process)
            for (each, has), value in samples.items()
            if each == name and wanted <= has
        ]
        return sum(found) if found else None

    def by(self, name: str, label: str, process: str | None = None) -> dict[str, float]:
        """Sums of a sample by the values of a label, in the order of the text."""
        sums: dict[str, float] = {}
        for samples in self._of(process):
            for (each, has), value in samples.items():
                key = dict(has).get(label)
                if each == name and key is not None:
                    sums[key] = sums.get(key, 0.0) + value
        return sums

    def _of(self, process: str | None) -> Iterable[Samples]:
        named = self.processes.values() if process is None else [self.processes.get(process)]
        return [samples for samples in named if samples is not None]


def parse(text: str, *, source: str) -> Samples:
    """The samples of one scrape.

    Args:
        text: In Prometheus' format.
        source: Who said it, for the error.

    Raises:
        InputError: It is not in that format.
    """
    try:
        return {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, KeyError) as error:
        raise InputError(f"{source} shows no metrics in Prometheus' format: {error}") from None
