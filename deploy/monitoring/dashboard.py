"""The Grafana dashboard, as a table of rows and panels; `python -m deploy.monitoring.dashboard`.

Writes `grafana.json` beside this file. A test evaluates every expression against a real Prometheus.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent / "grafana.json"
RUN = '{run="$run"}'
"""What every expression selects; Grafana fills in the run."""


class Panel(NamedTuple):
    """One diagram."""

    title: str
    unit: str
    """Of Grafana."""
    series: tuple[tuple[str, str], ...]
    """Expressions, in which RUN stands for the selector of the run, and their legends."""
    text: str = ""
    """What a reader needs to know."""


def _rate(metric: str, labels: str = "", by: str = "") -> str:
    selector = '{run="$run"' + (f",{labels}" if labels else "") + "}"
    rate = f"rate({metric}{selector}[$__rate_interval])"
    return f"sum by ({by}) ({rate})" if by else f"sum({rate})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Health at a glance": (
        Panel("batches trained", "short", ((f"headway_version{RUN}", "trained"),)),
        Panel(
            "since the last batch",
            "s",
            ((f"time() - headway_last_batch_timestamp_seconds{RUN}", "seconds"),),
        ),
        Panel("processes that answer", "short", (("sum by (role) (up" + RUN + ")", "{{role}}"),)),
        Panel(
            "waits that last too long",
            "short",
            ((f"headway_overdue_waits{RUN}", "overdue"),),
            "`headway top` and the run's waits.jsonl say who waits on whom.",
        ),
        Panel(
            "restarts",
            "short",
            ((f"sum(headway_restarts_total{RUN}) or vector(0)", "processes made again"),),
        ),
        Panel("failed groups", "short", (('headway_groups{run="$run",state="failed"}', "failed"),)),
        Panel("room on the disk of the run", "bytes", ((f"headway_disk_free_bytes{RUN}", "free"),)),
    ),
    "Throughput and idle": (
        Panel(
            "tokens a second",
            "short",
            (
                (_rate("headway_tokens_generated_total"), "generated"),
                (_rate("headway_tokens_trained_total"), "trained"),
            ),
        ),
        Panel(
            "rollouts a second",
            "short",
            (
                (_rate("headway_rollouts_generated_total"), "generated"),
                (_rate("headway_rollouts_trained_total"), "trained"),
            ),
        ),
        Panel(
            "learner, share of time",
            "percentunit",
            ((_rate("headway_learner_seconds_total", by="phase"), "{{phase}}"),),
            "While it waits for a batch it is idle.",
        ),
        Panel(
            "actors idle, share of time",
            "percentunit",
            ((_rate("headway_idle_seconds_total", by="process, on"), "{{process}}: {{on}}"),),
            "Without a running rollout, by what was waited for.",
        ),
        Panel("running rollouts", "short", ((f"headway_running_rollouts{RUN}", "{{process}}"),)),
    ),
    "Staleness and effective sample size": (
        Panel(
            "token lag, versions",
            "short",
            (
                (f"headway_lag_mean{RUN}", "mean"),
                (f"headway_max_lag{RUN}", "largest"),
                (f"headway_staleness_window{RUN}", "window of new groups"),
                (f"headway_max_staleness{RUN}", "allowed"),
            ),
        ),
        Panel(
            "tokens by lag",
            "short",
            ((_rate("headway_token_lag_bucket", by="le"), "at most {{le}}"),),
        ),
        Panel(
            "groups by lag of their oldest token",
            "short",
            ((_rate("headway_group_lag_bucket", by="le"), "at most {{le}}"),),
        ),
        Panel("effective sample size", "percentunit", ((f"headway_ess{RUN}", "share of tokens"),)),
        Panel(
            "KL(sampler ‖ learner), nats a token",
            "short",
            ((f"headway_origin_kl{RUN}", "{{origin}}"),),
            "fresh: engine and learner differ; crossed: kept KV cache; stale: older versions.",
        ),
        Panel(
            "tokens clipped, capped, rejected",
            "percentunit",
            ((f"headway_token_fraction{RUN}", "{{kind}}"),),
        ),
    ),
    "Queues": (
        Panel(
            "groups in flight",
            "short",
            (('headway_groups{run="$run",state=~"queued|leased|ready|taken"}', "{{state}}"),),
        ),
        Panel(
            "live groups and window",
            "short",
            ((f"headway_live_groups{RUN}", "live"), (f"headway_window_groups{RUN}", "window")),
        ),
        Panel(
            "oldest group in each queue",
            "s",
            (
                (f"headway_ready_oldest_seconds{RUN}", "results"),
                (f"headway_queued_oldest_seconds{RUN}", "prompts"),
            ),
        ),
        Panel(
            "groups the learner waits for",
            "short",
            (
                (f"headway_learner_waits_for_groups{RUN}", "due and not ready"),
                (f"headway_overdue_groups{RUN}", "overdue"),
            ),
        ),
        Panel(
            "ended otherwise than trained",
            "short",
            (
                ('headway_groups{run="$run",state=~"dropped|failed"}', "{{state}}"),
                (f"headway_results_refused_total{RUN}", "results: {{reason}}"),
                (f"sum(headway_leases_given_back_total{RUN}) or vector(0)", "leases given back"),
            ),
        ),
    ),
    "Weight sync": (
        Panel(
            "seconds of an update, by phase",
            "s",
            (
                (
                    f"rate(headway_weight_update_seconds_total{RUN}[$__rate_interval]) / ignoring"
                    f" (phase) group_left rate(headway_weight_updates_total{RUN}"
                    "[$__rate_interval])",
                    "{{engine}}: {{phase}}",
                ),
            ),
            "prepare: loads while it generates; pause: stands still; serve: from publishing on.",
        ),
        Panel(
            "version of each engine",
            "short",
            ((f"headway_engine_version{RUN}", "{{engine}}"), (f"headway_version{RUN}", "learner")),
        ),
        Panel("bytes a second", "Bps", ((_rate("headway_weight_update_bytes_total"), "loaded"),)),
        Panel(
            "failed updates",
            "short",
            ((f"headway_weight_update_failures_total{RUN}", "{{engine}}"),),
        ),
    ),
    "Learning": (
        Panel("reward", "short", ((f"headway_reward_mean{RUN}", "mean of a batch"),)),
        Panel("held-out score", "short", ((f"headway_heldout_score{RUN}", "{{kind}}"),)),
        Panel("response length", "short", ((f"headway_response_length_mean{RUN}", "tokens"),)),
        Panel("entropy", "short", ((f"headway_entropy_mean{RUN}", "nats a token"),)),
        Panel("loss", "short", ((f"headway_loss{RUN}", "loss"),)),
        Panel("gradient norm", "short", ((f"headway_grad_norm{RUN}", "before clipping"),)),
        Panel(
            "groups without a signal",
            "short",
            ((_rate("headway_tied_groups_total"), "a second"),),
        ),
    ),
    "System": (
        Panel("memory", "bytes", ((f"headway_process_resident_memory_bytes{RUN}", "{{process}}"),)),
        Panel(
            "cores in use",
            "short",
            ((_rate("headway_process_cpu_seconds_total", by="process"), "{{process}}"),),
        ),
        Panel(
            "packing and balance",
            "percentunit",
            (
                (f"headway_pack_efficiency{RUN}", "tokens over room of rows"),
                (f"1 / headway_rank_imbalance{RUN}", "mean over busiest rank"),
            ),
        ),
    ),
}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3


def expressions() -> list[str]:
    """Every expression of the dashboard."""
    return [
        expression for panels in ROWS.values() for panel in panels for expression, _ in panel.series
    ]


def build() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": row,
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1},
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(members):
            place = {
                "x": index % COLUMNS * WIDTH,
                "y": top + index // COLUMNS * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(
                {
                    "type": "timeseries",
                    "title": panel.title,
                    "description": panel.text,
                    "id": len(panels) + 1,
                    "gridPos": place,
                    "datasource": source,
                    "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
                    "targets": [
                        {
                            "refId": chr(ord("A") + number),
                            "datasource": source,
                            "expr": expression,
                            "legendFormat": legend,
                        }
                        for number, (expression, legend) in enumerate(panel.series)
                    ],
                }
            )
        top += -(-len(members) // COLUMNS) * HEIGHT
    return {
        "title": "Headway",
        "uid": "headway",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(headway_steps, run)",
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The file."""
    return json.dumps(build(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
