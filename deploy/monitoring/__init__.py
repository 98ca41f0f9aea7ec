"""What ships for Prometheus and Grafana: how to find runs, alert rules, a dashboard."""
