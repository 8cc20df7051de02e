"""The memory and the time that a recipe takes on a cluster, predicted without the cluster."""
