"""Report to the operator: Prometheus metrics and one-line logs."""
