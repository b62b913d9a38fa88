"""What the operator sees: Prometheus metrics and one-line logs."""
