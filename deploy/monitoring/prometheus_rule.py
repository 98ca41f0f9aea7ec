"""The alert rules as a manifest of the Prometheus operator.

`python -m deploy.monitoring.prometheus_rule` writes `prometheusrule.yaml` beside the other
manifests, from `rules.yml`, whose text it keeps.
"""

from pathlib import Path
from textwrap import indent

RULES = Path(__file__).parent / "rules.yml"
FILE = Path(__file__).parents[1] / "kubernetes" / "monitoring" / "prometheusrule.yaml"
HEAD = """\
# Made from deploy/monitoring/rules.yml by: python -m deploy.monitoring.prometheus_rule
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: headway
  labels:
    release: prometheus
spec:
"""


def text() -> str:
    """The file."""
    return HEAD + indent(RULES.read_text(), "  ")


if __name__ == "__main__":
    FILE.write_text(text())
