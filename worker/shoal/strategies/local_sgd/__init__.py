"""Members that step their own replicas and meet at the end of each round."""
