"""The benchmark: named workloads, one runner, peers beside backends, and reports that show losses too."""
