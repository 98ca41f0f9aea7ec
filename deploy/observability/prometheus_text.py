"""Metrics of all processes of a run at one moment, parsed from Prometheus' text format.

Pure: `run_client` fetches the text, `top_model` interprets the numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deploy.errors import InputError

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by the name of a sample and its labels."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Metrics of a run at one moment."""

    at: float
    """Epoch seconds on the machine that asks."""
    run: str
    processes: Mapping[str, Samples | None]
    """By name, as "actor-0", in the run's order; None where a process does not answer."""

    def value(self, name: str, process: str | None = None, **labels: str) -> float | None:
        """Return the sum of the samples with a name and labels; None where there is none.

        The name includes `_total`. With `process`, only samples of this process count.
        """
        wanted = frozenset(labels.items())
        values = [
            value
            for samples in self._samples(process)
            for (sample, known), value in samples.items()
            if sample == name and wanted <= known
        ]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a sample by the values of a label, in the order of the text."""
        sums: dict[str, float] = {}
        for samples in self._samples(None):
            for (sample, known), value in samples.items():
                key = dict(known).get(label)
                if sample == name and key is not None:
                    sums[key] = sums.get(key, 0.0) + value
        return sums

    def _samples(self, process: str | None) -> Iterable[Samples]:
        chosen = self.processes.values() if process is None else [self.processes.get(process)]
        return [samples for samples in chosen if samples is not None]


def parse(text: str, *, source: str) -> Samples:
    """Parse the samples of one scrape.

    Raises:
        InputError: The text is not in Prometheus' format; names its source.
    """
    try:
        return {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, KeyError) as error:
        raise InputError(f"{source} shows no metrics in Prometheus' format: {error}") from None
